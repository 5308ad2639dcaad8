// Checks the CUDA linears with quantised weights, or times them on the matrices of Llama-3-8B:
//   cuda_linear_quantized check [small]    small: few and small cases, for compute-sanitizer
//   cuda_linear_quantized check mma|mma-small  the kernels that need no Hopper, and those of experts
//   cuda_linear_quantized time             against bf16 weights
//   cuda_linear_quantized time mma         the kernels that need no Hopper
//   cuda_linear_quantized sweep FILE.csv   every configuration, against the one that is chosen
// Any number of --libraries FOLDER: where to look for cuBLASLt first.
//
// Times are replays of a CUDA graph over at least 0.5 GB of distinct weights, kernels overlapping as they do in a decode step;
// linears that leave partial sums to the next kernel are timed so, from 65 tokens on with the norm that reads them. Shares are of
// the bytes of codes and scales at 4.51 TB/s, what an H200 reads at.
#include "cuda_linear_quantized.h"

#include <cstdio>
#include <span>
#include <string>

#include "backends/cuda/linear_mma.h"
#include "backends/cuda/rows.h"
#include "cuda_linear_time.h"

namespace maga::bench {
namespace {

using cuda::LinearArgs;

constexpr int64_t kDistinctBytes = 500'000'000;
constexpr int kMostLaunches = 64;

constexpr std::span kMatrices = std::span(kLlama3_8B).first<4>();  // the head stays as it is
constexpr int kLayers = 32;

class Timer {
 public:
  Timer() : coded_(int64_t{28672} * 4096) {
    fill(DType::bf16, weights_.at(), static_cast<int64_t>(weights_.bytes() / 2), 0.03f, 1);
    fill(DType::bf16, x_.at(), static_cast<int64_t>(x_.bytes() / 2), 1.7f, 2);
    fill(DType::bf16, residual_.at(), static_cast<int64_t>(residual_.bytes() / 2), 1.f, 3);
    MAGA_CUDA(cudaDeviceSynchronize());
  }

  // Copies of one quantised matrix, or values that are there already.
  void prepare(const Matrix& matrix, const CodeForm* form) {
    layout_ = {};
    bytes_ = matrix.rows() * matrix.k * 2;
    if (form) {
      coded_.make(stream, *form, DType::bf16, matrix.rows(), matrix.k, 5);
      layout_ = coded_.layout();
      bytes_ = cuda::affine_bytes(layout_.affine, matrix.rows(), matrix.k);
    }
    copies_ = static_cast<int>(std::min<int64_t>(static_cast<int64_t>(units_.bytes()) / bytes_, (kDistinctBytes - 1) / bytes_ + 1));
    for (int i = 0; form && i < copies_; ++i)
      MAGA_CUDA(cudaMemcpyAsync(units_.at(i * bytes_), coded_.units(), bytes_, cudaMemcpyDeviceToDevice, stream));
  }
  int64_t bytes() const { return bytes_; }

  LinearArgs args(const Matrix& matrix, int m) {
    return {.layout = layout_,
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
            .scratch = scratch_.at(),
            .widened = widened_.at()};
  }
  LinearArgs args_of_step(const Matrix& matrix, int m) {
    LinearArgs call = args(matrix, m);
    call.weight = weight(0);
    if (matrix.split && cuda::slabs_of(call) > 0) call.slabs = slabs();
    return call;
  }

  // Microseconds a launch. `slabs`: how many it leaves.
  double us(const Matrix& matrix, const LinearArgs& args, int slabs, const std::function<void(const LinearArgs&)>& run) {
    const double flops = 2. * args.m * static_cast<double>(matrix.rows()) * matrix.k;
    const int launches = std::max(std::min(copies_, kMostLaunches), std::min(12, static_cast<int>(4e12 / flops)));
    LinearArgs call = args;
    const auto each = [&](int i) {
      call.weight = weight(i % copies_);
      run(call);
      if (args.m <= 64 || !matrix.split) return;
      const cuda::Matrix out{args.out, args.out_stride};
      cuda::NormArgs norm{.in = out,
                          .out = {normed_.at(), args.n},
                          .rows = args.m,
                          .width = args.n,
                          .group = args.n,
                          .weight = weights_.at(),
                          .eps = 1e-5f};
      if (slabs > 0)
        norm.slabs = {.data = args.slabs, .count = slabs, .bias = nullptr}, norm.residual = {residual_.at(), args.n},
        norm.sum = out;
      cuda::norm({stream, true}, DType::bf16, norm);
    };
    each(0);  // chooses and loads kernels
    return stopwatch_.us(stream, [&] {
      for (int i = 0; i < launches; ++i) each(i);
    }) / launches;
  }
  double us(const Matrix& matrix, int m) {
    const LinearArgs call = args_of_step(matrix, m);
    return us(matrix, call, call.slabs ? cuda::slabs_of(call) : 0, [&](const LinearArgs& a) { linears.run({stream, true}, a); });
  }

  float* slabs() { return static_cast<float*>(slab_memory_.at()); }
  const void* weight(int i) const {
    return layout_.form == cuda::WeightForm::dense ? weights_.at(i * bytes_) : units_.at(i * bytes_);
  }

  cudaStream_t stream = make_stream();
  cuda::Linears linears;
  cuda::Affines affines;

 private:
  CodedWeight coded_;
  DeviceBuffer weights_{1'060'000'000}, units_{1'060'000'000}, x_{size_t{2048} * 14336 * 2}, out_{size_t{2048} * 14336 * 2},
      slab_memory_{size_t{256} << 20}, residual_{size_t{2048} * 6144 * 2}, normed_{residual_.bytes()},
      scratch_{cuda::linear_scratch_bytes(2048, 14336, DType::bf16)}, widened_{cuda::kWidenedBytes};
  cuda::WeightLayout layout_;
  int64_t bytes_ = 0;
  int copies_ = 1;
  Stopwatch stopwatch_;
};

std::string name_of(const cuda::AffineConfig& c) {
  return concat("<", c.tile.tokens, ",", c.tile.groups, ",", c.tile.tiles, "> split ", c.split, ", ", c.ctas * c.split, " CTAs, ",
                c.stages, " stages, window ", c.window);
}

void time_linears(Timer& timer) {
  constexpr int kTokens[] = {1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048};
  const CodeForm forms[] = {{4, 128}, {4, 32}, {4, 128, cuda::AffineShift::zeros}, {8, 0}};
  std::vector<std::vector<double>> dense;
  for (const Matrix& matrix : kMatrices) {
    timer.prepare(matrix, nullptr);
    dense.emplace_back();
    for (const int m : kTokens) dense.back().push_back(timer.us(matrix, m));
  }
  for (const CodeForm& form : forms) {
    std::printf("%s\n%-8s %5s %9s %7s %9s\n", form.name().c_str(), "", "m", "us", "share", "bf16");
    std::vector<double> sums(std::size(kTokens)), dense_sums(std::size(kTokens));
    for (size_t i = 0; i < kMatrices.size(); ++i) {
      const Matrix& matrix = kMatrices[i];
      timer.prepare(matrix, &form);
      for (size_t t = 0; t < std::size(kTokens); ++t) {
        const double us = timer.us(matrix, kTokens[t]);
        sums[t] += us, dense_sums[t] += dense[i][t];
        std::printf("%-8s %5d %9.2f %7.3f %9.2f  x%.2f  %s\n", matrix.name, kTokens[t], us,
                    static_cast<double>(timer.bytes()) / kBytesPerUs / us, dense[i][t], dense[i][t] / us,
                    name_of(cuda::choose_affine(timer.affines.shape_of(timer.args_of_step(matrix, kTokens[t])))).c_str());
      }
    }
    for (size_t t = 0; t < std::size(kTokens); ++t)
      std::printf("all of a step, m %5d: %7.3f ms, bf16 %7.3f  x%.2f\n", kTokens[t], sums[t] * kLayers / 1e3,
                  dense_sums[t] * kLayers / 1e3, dense_sums[t] / sums[t]);
  }
}

void time_mma(Timer& timer) {
  cuda::Mmas mmas;
  for (const CodeForm& form : {CodeForm{4, 128}, CodeForm{4, 128, cuda::AffineShift::zeros}, CodeForm{8, 0},
                               CodeForm{8, 0, cuda::AffineShift::none, true}})
    for (const Matrix& matrix : kMatrices) {
      std::vector<double> dense;
      constexpr int kTokens[] = {1, 8, 16, 32, 64, 128, 256, 1024};
      timer.prepare(matrix, nullptr);
      for (const int m : kTokens) dense.push_back(timer.us(matrix, m));
      timer.prepare(matrix, &form);
      for (size_t t = 0; t < std::size(kTokens); ++t) {
        LinearArgs args = timer.args(matrix, kTokens[t]);
        if (matrix.split && args.m <= 256) args.slabs = timer.slabs();
        const cuda::MmaConfig c = cuda::choose_mma(mmas.shape_of(args), mmas.card());
        if (c.split == 1) args.slabs = nullptr;
        const double us =
            timer.us(matrix, args, c.split > 1 ? c.split : 0, [&](const LinearArgs& a) { mmas.run({timer.stream, true}, a, c); });
        std::printf("%s: %-8s m %5d %9.2f us, share %.3f, bf16 %9.2f us x%.2f  <%d,%d> deep %d, split %d, %d CTAs, %d stages\n",
                    form.name().c_str(), matrix.name, args.m, us, static_cast<double>(timer.bytes()) / kBytesPerUs / us, dense[t],
                    dense[t] / us, c.tile.tokens, c.tile.tiles, c.deep, c.split, c.ctas * c.split, c.stages);
      }
    }
}

void sweep(Timer& timer, const char* path) {
  FILE* const csv = std::fopen(path, "w");
  MAGA_REQUIRE(csv, "cannot write ", path);
  std::fprintf(csv, "bits,matrix,m,tokens,groups,tiles,split,ctas,stages,window,us\n");
  for (const CodeForm& form : {CodeForm{4, 128}, CodeForm{8, 0}})
    for (const Matrix& matrix : kMatrices) {
      timer.prepare(matrix, &form);
      for (const int m : {1, 16, 32, 64, 128, 256, 1024}) {
        LinearArgs args = timer.args(matrix, m);
        args.weight = timer.weight(0);
        if (matrix.split) args.slabs = timer.slabs();
        const cuda::AffineShape shape = timer.affines.shape_of(args);
        const cuda::AffineConfig chosen = cuda::choose_affine(shape);
        std::vector<cuda::AffineConfig> configs = {chosen};
        for (const cuda::AffineConfig& config : cuda::affine_configs(shape)) configs.push_back(config);
        double chosen_us = 0, best_us = 1e9;
        cuda::AffineConfig best = chosen;
        for (size_t i = 0; i < configs.size(); ++i) {
          LinearArgs call = args;
          if (configs[i].split == 1) call.slabs = nullptr;
          const cuda::AffineConfig& c = configs[i];
          const double us = timer.us(matrix, call, c.split > 1 ? c.split : 0,
                                     [&](const LinearArgs& a) { timer.affines.run({timer.stream, true}, a, c); });
          std::fprintf(csv, "%d,%s,%d,%d,%d,%d,%d,%d,%d,%d,%.2f\n", form.bits, matrix.name, m, c.tile.tokens, c.tile.groups,
                       c.tile.tiles, c.split, c.ctas, c.stages, c.window, us);
          if (i == 0) chosen_us = us;
          if (us < best_us) best_us = us, best = c;
        }
        std::printf("%d bits %s m %d: chosen %.2f us %s, best of %zu %.2f (x%.3f) %s\n", form.bits, matrix.name, m, chosen_us,
                    name_of(chosen).c_str(), configs.size(), best_us, chosen_us / best_us, name_of(best).c_str());
        std::fflush(csv);
      }
    }
  std::fclose(csv);
}

int run(const std::string& mode, const std::string& more) {
  if (mode == "check" && (more.empty() || more == "small")) return check_quantized(make_stream(), more == "small") ? 1 : 0;
  if (mode == "check" && (more == "mma" || more == "mma-small")) return check_mma(make_stream(), more == "mma-small") ? 1 : 0;
  if (mode == "time" && (more.empty() || more == "mma")) {
    Timer timer;
    return more.empty() ? time_linears(timer) : time_mma(timer), 0;
  }
  if (mode == "sweep" && !more.empty()) {
    Timer timer;
    return sweep(timer, more.c_str()), 0;
  }
  return -1;
}

}  // namespace
}  // namespace maga::bench

int main(int count, char** words) {
  return maga::bench::run_program(count, words, "cuda_linear_quantized check [small|mma|mma-small] | time [mma] | sweep FILE.csv",
                                  maga::bench::run);
}
