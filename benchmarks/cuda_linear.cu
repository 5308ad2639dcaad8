// Checks the CUDA linears, or times them on the matrices of real models:
//   cuda_linear check [small | tiles | small-tiles]   small: few and small cases, for compute-sanitizer; tiles: those kernels alone
//   cuda_linear time [all]                    all: small models too
//   cuda_linear sweep FILE.csv                every streaming configuration, against the one that is chosen
//   cuda_linear layer                         the 8B's linears one after another, as in a step
//   cuda_linear tiles FILE.csv                tiled configurations of the 8B's linears, against the one expected to be fastest
// Any number of --libraries FOLDER: where to look for cuBLASLt first.
//
// Times are replays of a CUDA graph over at least 0.5 GB of distinct weights, kernels overlapping as they do in a decode step;
// linears that leave partial sums to the next kernel are timed so. From 65 tokens on the norm that reads them is part of the time,
// of cuBLASLt's too, and so is the activation of a gated linear. Shares are of 4.51 TB/s, what an H200 reads at.
#include "cuda_linear.h"

#include <cstdio>
#include <string>

#include "backends/cuda/linear_gemm.h"
#include "backends/cuda/linear_stream.h"
#include "backends/cuda/linear_tiles.h"
#include "backends/cuda/rows.h"
#include "cuda_linear_time.h"

namespace maga::bench {
namespace {

using cuda::LinearArgs;

constexpr int64_t kDistinctBytes = 500'000'000;
constexpr int kMostLaunches = 120;

int64_t bytes_of(const Matrix& matrix) { return matrix.rows() * matrix.k * 2; }

struct Model {
  const char* name;
  Matrices matrices;
};
constexpr Model kModels[] = {{"Llama-3-8B", kLlama3_8B},
                             {"Llama-3.2-1B",
                              {{{"qkv", 3072, 2048, false, true},
                                {"o", 2048, 2048, false, true},
                                {"gate_up", 8192, 2048, true, false},
                                {"down", 2048, 8192, false, true},
                                {"head", 128256, 2048, false, false, true}}}},
                             {"SmolLM-135M",
                              {{{"qkv", 960, 576, false, true},
                                {"o", 576, 576, false, true},
                                {"gate_up", 1536, 576, true, false},
                                {"down", 576, 1536, false, true},
                                {"head", 49152, 576, false, false, true}}}}};

class Timer {
 public:
  Timer() {
    fill(DType::bf16, weights_.at(), static_cast<int64_t>(weights_.bytes() / 2), 0.03f, 1);
    fill(DType::bf16, x_.at(), static_cast<int64_t>(x_.bytes() / 2), 1.7f, 2);
    fill(DType::bf16, residual_.at(), static_cast<int64_t>(residual_.bytes() / 2), 1.f, 3);
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
            .out_type = matrix.f32 ? DType::f32 : DType::bf16,
            .gated = matrix.gated,
            .scratch = scratch_.at()};
  }

  struct Call {
    LinearArgs args;
    std::function<void(const LinearArgs&)> run;
  };
  // Microseconds a launch of each call.
  std::vector<double> us(const Matrix& matrix, const std::vector<Call>& calls) {
    const int64_t most = static_cast<int64_t>(weights_.bytes()) / bytes_of(matrix);
    const int copies = static_cast<int>(std::min<int64_t>({most, kMostLaunches, (kDistinctBytes - 1) / bytes_of(matrix) + 1}));
    const double flops = 2. * calls[0].args.m * static_cast<double>(bytes_of(matrix)) / 2;
    const int launches = std::max(copies, std::min(12, static_cast<int>(4e12 / flops)));
    std::vector<std::function<void()>> works;
    for (const Call& call : calls) {
      call.run(call.args);  // chooses and loads kernels
      works.emplace_back([this, &matrix, &call, copies, launches] {
        LinearArgs args = call.args;
        for (int i = 0; i < launches; ++i) {
          args.weight = weights_.at(i % copies * bytes_of(matrix));
          call.run(args);
        }
      });
    }
    std::vector<double> times = stopwatch_.us(stream, works);
    for (double& time : times) time /= launches;
    return times;
  }

  float* slabs() { return static_cast<float*>(slabs_.at()); }

  // The norm that follows a linear whose result, or partial sums, `args` describe.
  void norm(const cuda::Queue& queue, const LinearArgs& args, int slabs) {
    const cuda::Matrix out{args.out, args.out_stride};
    cuda::NormArgs call{.in = out,
                        .out = {normed_.at(), args.n},
                        .rows = args.m,
                        .width = args.n,
                        .group = args.n,
                        .weight = weights_.at(),
                        .eps = 1e-5f};
    if (slabs > 0) call.slabs = {.data = args.slabs, .count = slabs}, call.residual = {residual_.at(), args.n}, call.sum = out;
    cuda::norm(queue, args.type, call);
  }
  // A linear of more than 64 tokens with the norm behind it where a norm can add up partial sums. `split`: how many there are.
  void with_norm(const Matrix& matrix, const cuda::Queue& queue, LinearArgs args, int split,
                 const std::function<void(const LinearArgs&)>& run) {
    if (matrix.split && split <= 1) args.residual = residual_.at(), args.residual_stride = args.n;
    run(args);
    if (matrix.split) norm(queue, args, split > 1 ? split : 0);
  }
  void library(const Matrix& matrix, const LinearArgs& args) {
    const cuda::Queue queue{stream, true};
    with_norm(matrix, queue, args, 0, [&](LinearArgs a) {
      if (!a.gated) return gemms.run(queue, a, a.scratch);
      a.gated = false, a.n *= 2, a.out_stride = a.n, a.out = halves_.at();
      gemms.run(queue, a, a.scratch);
      cuda::activation(queue, a.type,
                       {.gate = {a.out, a.n},
                        .up = {static_cast<char*>(a.out) + args.n * size_of(a.type), a.n},
                        .out = {args.out, args.n},
                        .rows = a.m,
                        .width = args.n,
                        .kind = ActivationKind::silu});
    });
  }

  cudaStream_t stream = make_stream();
  cuda::Linears linears;
  cuda::Gemms gemms;
  cuda::Streams streams;
  cuda::Tiles tiles;

 private:
  DeviceBuffer weights_{1'060'000'000}, x_{size_t{8192} * 14336 * 2}, out_{size_t{8192} * 14336 * 2}, halves_{2 * out_.bytes()},
      slabs_{size_t{256} << 20}, residual_{size_t{8192} * 6144 * 2}, normed_{residual_.bytes()},
      scratch_{cuda::linear_scratch_bytes(8192, 14336, DType::bf16)};
  Stopwatch stopwatch_;
};

void describe(const cuda::StreamConfig& c) {
  std::printf("<%d,%d,%d,%d> split %d, %d CTAs, %d stages, window %d", c.tokens, c.tile.rows, c.tile.groups, c.tile.boxes, c.split,
              c.ctas * c.split, c.stages, c.window);
}

void describe(const cuda::TileConfig& c) {
  std::printf("%d x %d, shared %s, split %d", 64 * c.tile.groups, c.tile.rows, c.share_weights ? "weights" : "tokens", c.split);
}

void time_linears(Timer& timer, const Model& model) {
  // Few tokens first: busy matrix units lower the clock for what follows.
  for (const auto& tokens :
       {std::vector<int>{1, 2, 4, 8, 16, 32, 64}, std::vector<int>{80, 96, 128, 160, 192, 256, 320, 512, 1024, 2048, 8192}}) {
    std::printf("%s, bf16\n%-8s %5s %9s %7s %8s %9s\n", model.name, "", "m", "us", "share", "TFLOP/s", "cuBLASLt");
    for (const Matrix& matrix : model.matrices)
      for (const int m : tokens) {
        if (matrix.n > 100000 && m > 256) continue;  // logits are of sequences, not of prompts
        const bool few = m <= 64;
        LinearArgs args = timer.args(matrix, m);
        const int slabs = matrix.split ? cuda::slabs_of(args) : 0;
        if (slabs > 0) args.slabs = timer.slabs();
        const cuda::Queue queue{timer.stream, true};
        auto run = [&](const LinearArgs& a) { timer.linears.run(queue, a); };
        LinearArgs plain = timer.args(matrix, m);
        if (few) plain.n *= matrix.gated ? 2 : 1, plain.out_stride = plain.n;  // without the activation
        const std::vector<double> times =
            timer.us(matrix, {{args, [&](const LinearArgs& a) { few ? run(a) : timer.with_norm(matrix, queue, a, slabs, run); }},
                              {plain, [&](const LinearArgs& a) {
                                 few ? timer.gemms.run({timer.stream, false}, a, a.scratch) : timer.library(matrix, a);
                               }}});
        const double us = times[0], library = times[1];
        const double bytes = static_cast<double>(bytes_of(matrix));
        std::printf("%-8s %5d %9.2f %7.3f %8.1f %9.2f  x%.2f  ", matrix.name, m, us, bytes / kBytesPerUs / us, m * bytes / us / 1e6,
                    library, library / us);
        if (few) describe(cuda::choose_stream(timer.streams.shape_of(args)));
        std::printf("\n");
      }
  }
}

// The linears of a layer one after another, as a step has them, with the norms and the activation between: a kernel that runs again
// and again finds its instructions at hand, in a step it does not.
void time_layers(Timer& timer) {
  const std::vector<Matrix> matrices(kModels[0].matrices.begin(), kModels[0].matrices.end() - 1);  // but for the head
  int64_t bytes = 0;
  for (const Matrix& matrix : matrices) bytes += bytes_of(matrix);
  const Matrix layer{"layer", static_cast<int>(bytes / 2 / 4096), 4096, false, false};
  const cuda::Queue queue{timer.stream, true};
  std::printf("%s, bf16, a layer\n%5s %9s %9s\n", kModels[0].name, "m", "us", "cuBLASLt");
  for (const int m : {80, 96, 128, 160, 192, 256, 320, 512, 1024, 2048, 8192}) {
    auto each = [&](const LinearArgs& first, auto&& run) {
      int64_t offset = 0;
      for (const Matrix& matrix : matrices) {
        LinearArgs args = timer.args(matrix, m);
        args.weight = static_cast<const char*>(first.weight) + offset;
        offset += bytes_of(matrix);
        run(matrix, args);
      }
    };
    auto own = [&](const Matrix& matrix, LinearArgs args) {
      const int slabs = matrix.split ? cuda::slabs_of(args) : 0;
      if (slabs > 0) args.slabs = timer.slabs();
      timer.with_norm(matrix, queue, args, slabs, [&](const LinearArgs& a) { timer.linears.run(queue, a); });
    };
    auto library = [&](const Matrix& matrix, const LinearArgs& args) { timer.library(matrix, args); };
    const std::vector<double> us = timer.us(layer, {{timer.args(layer, m), [&](const LinearArgs& a) { each(a, own); }},
                                                    {timer.args(layer, m), [&](const LinearArgs& a) { each(a, library); }}});
    std::printf("%5d %9.1f %9.1f  x%.2f\n", m, us[0], us[1], us[1] / us[0]);
  }
}

void sweep_tiles(Timer& timer, const char* path) {
  constexpr size_t kMostConfigs = 20;
  FILE* const csv = std::fopen(path, "w");
  MAGA_REQUIRE(csv, "cannot write ", path);
  std::fprintf(csv, "matrix,m,tokens,rows,share_weights,split,us,cublaslt_us\n");
  for (const Matrix& matrix : kModels[0].matrices)
    for (const int m : {80, 128, 160, 192, 256, 320, 512, 1024, 2048, 8192}) {
      if (matrix.n > 100000 && m > 256) continue;
      const LinearArgs args = timer.args(matrix, m);
      cuda::TileShape shape = timer.tiles.shape_of(args);
      shape.may_split = matrix.split;
      std::vector<cuda::TileConfig> configs = cuda::tile_configs(shape);
      configs.resize(std::min(configs.size(), kMostConfigs));
      const cuda::Queue queue{timer.stream, true};
      std::vector<Timer::Call> calls = {{args, [&](const LinearArgs& a) { timer.library(matrix, a); }}};
      for (const cuda::TileConfig& config : configs) {
        LinearArgs call = args;
        if (config.split > 1) call.slabs = timer.slabs();
        calls.push_back({call, [&timer, &matrix, &config, queue](const LinearArgs& a) {
                           timer.with_norm(matrix, queue, a, config.split,
                                           [&](const LinearArgs& b) { timer.tiles.run(queue, b, config); });
                         }});
      }
      const std::vector<double> us = timer.us(matrix, calls);
      const double library = us[0];
      std::vector<std::pair<double, cuda::TileConfig>> times;
      for (size_t i = 0; i < configs.size(); ++i) {
        const cuda::TileConfig& config = configs[i];
        times.emplace_back(us[i + 1], config);
        std::fprintf(csv, "%s,%d,%d,%d,%d,%d,%.2f,%.2f\n", matrix.name, m, 64 * config.tile.groups, config.tile.rows,
                     config.share_weights, config.split, us[i + 1], library);
      }
      const auto best = std::ranges::min_element(times, {}, &std::pair<double, cuda::TileConfig>::first);
      std::printf("%s m %d: cuBLASLt %.1f, chosen %.1f us (x%.2f; ", matrix.name, m, library, times[0].first,
                  library / times[0].first);
      describe(times[0].second);
      std::printf("), best of %zu %.1f (x%.2f; ", times.size(), best->first, library / best->first);
      describe(best->second);
      std::printf(")\n");
      std::fflush(csv);
    }
  std::fclose(csv);
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
          const double us =
              timer.us(matrix, {{args, [&](const LinearArgs& a) { timer.streams.run({timer.stream, true}, a, c); }}})[0];
          std::fprintf(csv, "%s,%s,%d,%d,%d,%d,%d,%d,%d,%d,%d,%d,%.3f,%.3f\n", model.name, matrix.name, m, c.tokens, c.tile.rows,
                       c.tile.groups, c.tile.boxes, c.split, c.ctas, c.stages, c.window, i == 0, us,
                       static_cast<double>(bytes_of(matrix)) / kBytesPerUs / us);
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

int run(const std::string& mode, const std::string& more) {
  if (mode == "check" && (more.empty() || more == "small" || more == "tiles" || more == "small-tiles"))
    return check_linears(make_stream(), more.starts_with("small"), more.ends_with("tiles")) ? 1 : 0;
  if (mode == "time" && (more.empty() || more == "all")) {
    Timer timer;
    for (const Model& model : kModels)
      if (more == "all" || &model != &kModels[2]) time_linears(timer, model);
    return 0;
  }
  if (mode == "layer" && more.empty()) {
    Timer timer;
    return time_layers(timer), 0;
  }
  if ((mode == "sweep" || mode == "tiles") && !more.empty()) {
    Timer timer;
    mode == "sweep" ? sweep(timer, more.c_str()) : sweep_tiles(timer, more.c_str());
    return 0;
  }
  return -1;
}

}  // namespace
}  // namespace maga::bench

int main(int count, char** words) {
  return maga::bench::run_program(
      count, words, "cuda_linear check [small|tiles|small-tiles] | time [all] | layer | sweep FILE.csv | tiles FILE.csv",
      maga::bench::run);
}
