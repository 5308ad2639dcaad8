// Checks the CUDA linears, or times them on the matrices of real models:
//   cuda_linear check [small]                 small: few and small cases, for compute-sanitizer
//   cuda_linear time [all]                    all: small models too
//   cuda_linear sweep FILE.csv                every streaming configuration, against the one that is chosen
// Any number of --libraries FOLDER: where to look for cuBLASLt first.
//
// Times are replays of a CUDA graph over at least 0.5 GB of distinct weights, kernels overlapping as they do in a decode step;
// linears that leave partial sums to the next kernel are timed so. Shares are of 4.51 TB/s, what an H200 reads at.
#include "cuda_linear.h"

#include <cstdio>
#include <cstring>
#include <string>

#include "backends/cuda/cublaslt.h"
#include "backends/cuda/linear_gemm.h"
#include "backends/cuda/linear_stream.h"

namespace maga::bench {
namespace {

using cuda::LinearArgs;

constexpr double kBytesPerUs = 4.51e6;
constexpr int64_t kDistinctBytes = 500'000'000;
constexpr int kMostLaunches = 120;

struct Matrix {
  const char* name;
  int n, k;  // gated: 2 n rows
  bool gated, split;
  int64_t bytes() const { return int64_t{n} * k * 2 * (gated ? 2 : 1); }
};
struct Model {
  const char* name;
  std::vector<Matrix> matrices;
};
const Model kModels[] = {{"Llama-3-8B",
                          {{"qkv", 6144, 4096, false, true},
                           {"o", 4096, 4096, false, true},
                           {"gate_up", 14336, 4096, true, false},
                           {"down", 4096, 14336, false, true},
                           {"head", 128256, 4096, false, false}}},
                         {"Llama-3.2-1B",
                          {{"qkv", 3072, 2048, false, true},
                           {"o", 2048, 2048, false, true},
                           {"gate_up", 8192, 2048, true, false},
                           {"down", 2048, 8192, false, true},
                           {"head", 128256, 2048, false, false}}},
                         {"SmolLM-135M",
                          {{"qkv", 960, 576, false, true},
                           {"o", 576, 576, false, true},
                           {"gate_up", 1536, 576, true, false},
                           {"down", 576, 1536, false, true},
                           {"head", 49152, 576, false, false}}}};

class Timer {
 public:
  Timer() {
    MAGA_CUDA(cudaStreamCreate(&stream));
    MAGA_CUDA(cudaEventCreate(&begin_));
    MAGA_CUDA(cudaEventCreate(&end_));
    fill(DType::bf16, weights_.at(), static_cast<int64_t>(weights_.bytes() / 2), 0.03f, 1);
    fill(DType::bf16, x_.at(), static_cast<int64_t>(x_.bytes() / 2), 1.7f, 2);
    MAGA_CUDA(cudaDeviceSynchronize());
  }

  LinearArgs args(const Matrix& matrix, int m) {
    return {.weight = weights_.at(),
            .x = x_.at(),
            .x_stride = matrix.k,
            .m = m,
            .n = matrix.n,
            .k = matrix.k,
            .type = DType::bf16,
            .out = out_.at(),
            .out_stride = matrix.n,
            .out_type = DType::bf16,
            .gated = matrix.gated,
            .scratch = scratch_.at()};
  }

  // Microseconds a launch of `run(args)`: the median of five timings.
  double us(const Matrix& matrix, const LinearArgs& args, const std::function<void(const LinearArgs&)>& run) {
    const int64_t most = static_cast<int64_t>(weights_.bytes()) / matrix.bytes();
    const int copies = static_cast<int>(std::min<int64_t>({most, kMostLaunches, (kDistinctBytes - 1) / matrix.bytes() + 1}));
    const double flops = 2. * args.m * static_cast<double>(matrix.bytes()) / 2;
    const int launches = std::max(copies, std::min(12, static_cast<int>(4e12 / flops)));
    LinearArgs call = args;
    run(call);  // chooses and loads kernels
    const Graph graph(stream, [&] {
      for (int i = 0; i < launches; ++i) {
        call.weight = weights_.at(i % copies * matrix.bytes());
        run(call);
      }
    });
    graph.launch(stream);
    std::vector<double> times;
    for (int i = 0; i < 5; ++i) {
      float ms = 0;
      MAGA_CUDA(cudaEventRecord(begin_, stream));
      graph.launch(stream);
      MAGA_CUDA(cudaEventRecord(end_, stream));
      MAGA_CUDA(cudaStreamSynchronize(stream));
      MAGA_CUDA(cudaEventElapsedTime(&ms, begin_, end_));
      times.push_back(ms * 1e3 / launches);
    }
    std::sort(times.begin(), times.end());
    return times[2];
  }

  float* slabs() { return static_cast<float*>(out_.at()); }

  cudaStream_t stream = nullptr;
  cuda::Linears linears;
  cuda::Gemms gemms;
  cuda::Streams streams;

 private:
  DeviceBuffer weights_{1'060'000'000}, x_{size_t{4096} * 14336 * 2}, out_{size_t{4096} * 128256 * 2},
      scratch_{cuda::linear_scratch_bytes(4096, 14336, DType::bf16)};
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

void describe(const cuda::StreamConfig& c) {
  std::printf("<%d,%d,%d,%d> split %d, %d CTAs, %d stages, window %d", c.tokens, c.tile.rows, c.tile.groups, c.tile.boxes, c.split,
              c.ctas * c.split, c.stages, c.window);
}

void time_linears(Timer& timer, const Model& model) {
  // Few tokens first: busy matrix units lower the clock for what follows.
  for (const auto& tokens : {std::vector<int>{1, 2, 4, 8, 16, 32, 64}, std::vector<int>{128, 256, 1024, 4096}}) {
    std::printf("%s, bf16\n%-8s %5s %9s %7s %8s %9s\n", model.name, "", "m", "us", "share", "TFLOP/s", "cuBLASLt");
    for (const Matrix& matrix : model.matrices)
      for (const int m : tokens) {
        if (matrix.n > 100000 && m > 256) continue;  // logits are of sequences, not of prompts
        LinearArgs args = timer.args(matrix, m);
        if (matrix.split && cuda::slabs_of(args) > 0) args.slabs = timer.slabs();
        const double us = timer.us(matrix, args, [&](const LinearArgs& a) { timer.linears.run({timer.stream, true}, a); });
        LinearArgs plain = timer.args(matrix, m);
        plain.n *= matrix.gated ? 2 : 1;  // without the activation
        plain.out_stride = plain.n;
        const double library =
            timer.us(matrix, plain, [&](const LinearArgs& a) { timer.gemms.run({timer.stream, false}, a, a.scratch); });
        const double bytes = static_cast<double>(matrix.bytes());
        std::printf("%-8s %5d %9.2f %7.3f %8.1f %9.2f  x%.2f  ", matrix.name, m, us, bytes / kBytesPerUs / us, m * bytes / us / 1e6,
                    library, library / us);
        if (timer.streams.takes(args)) describe(cuda::choose_stream(timer.streams.shape_of(args)));
        std::printf("\n");
      }
  }
}

void sweep(Timer& timer, const char* path) {
  FILE* const csv = std::fopen(path, "w");
  MAGA_REQUIRE(csv, "cannot write ", path);
  std::fprintf(csv, "model,matrix,m,tokens,rows,groups,boxes,split,ctas,stages,window,chosen,us,share\n");
  for (const Model& model : kModels)
    for (const Matrix& matrix : model.matrices)
      for (const int m : {1, 8, 16, 32, 64}) {
        LinearArgs args = timer.args(matrix, m);
        if (matrix.split) args.slabs = timer.slabs();
        const cuda::StreamShape shape = timer.streams.shape_of(args);
        const cuda::StreamConfig chosen = cuda::choose_stream(shape);
        std::vector<cuda::StreamConfig> configs = {chosen};
        for (cuda::StreamConfig config : cuda::stream_configs(shape)) {
          configs.push_back(config);
          const int other = config.window == config.stages ? (config.stages + 1) / 2 : config.stages;
          if (other != config.window) config.window = other, configs.push_back(config);
        }
        double chosen_us = 0, best_us = 1e9;
        cuda::StreamConfig best = chosen;
        for (size_t i = 0; i < configs.size(); ++i) {
          const cuda::StreamConfig& c = configs[i];
          const double us = timer.us(matrix, args, [&](const LinearArgs& a) { timer.streams.run({timer.stream, true}, a, c); });
          std::fprintf(csv, "%s,%s,%d,%d,%d,%d,%d,%d,%d,%d,%d,%d,%.3f,%.3f\n", model.name, matrix.name, m, c.tokens, c.tile.rows,
                       c.tile.groups, c.tile.boxes, c.split, c.ctas, c.stages, c.window, i == 0, us,
                       static_cast<double>(matrix.bytes()) / kBytesPerUs / us);
          if (i == 0) chosen_us = us;
          if (us < best_us) best_us = us, best = c;
        }
        std::printf("%s %s m %d: chosen %.2f us, best of %zu %.2f (x%.3f) ", model.name, matrix.name, m, chosen_us, configs.size(),
                    best_us, chosen_us / best_us);
        describe(best);
        std::printf("\n");
      }
  std::fclose(csv);
}

int run(int count, char** words) {
  std::vector<std::string> rest;
  for (int i = 1; i < count; ++i) {
    if (std::strcmp(words[i], "--libraries") == 0 && i + 1 < count)
      cuda::lt::add_library_folder(words[++i]);
    else
      rest.push_back(words[i]);
  }
  const std::string mode = rest.empty() ? "" : rest[0];
  const std::string more = rest.size() > 1 ? rest[1] : "";
  if (mode == "check" && (more.empty() || more == "small")) {
    cudaStream_t stream;
    MAGA_CUDA(cudaStreamCreate(&stream));
    return check_linears(stream, more == "small") ? 1 : 0;
  }
  if (mode == "time" && (more.empty() || more == "all")) {
    Timer timer;
    for (const Model& model : kModels)
      if (more == "all" || &model != &kModels[2]) time_linears(timer, model);
    return 0;
  }
  if (mode == "sweep" && !more.empty()) {
    Timer timer;
    sweep(timer, more.c_str());
    return 0;
  }
  std::fprintf(stderr, "usage: cuda_linear check [small] | time [all] | sweep FILE.csv  [--libraries FOLDER]\n");
  return 2;
}

}  // namespace
}  // namespace maga::bench

int main(int count, char** words) {
  try {
    return maga::bench::run(count, words);
  } catch (const maga::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
