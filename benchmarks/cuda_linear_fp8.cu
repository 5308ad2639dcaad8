// Checks the CUDA linears of e4m3 weights, or times them on the matrices of Llama-3-8B:
//   cuda_linear_fp8 check [small | bf16]  every kernel and epilogue against sums in double of the same rounded tokens and codes
//   cuda_linear_fp8 error             how far rounding the tokens takes a result, against exact tokens
//   cuda_linear_fp8 time              through Linears, beside cuBLASLt on bf16 weights
//   cuda_linear_fp8 sweep             every configuration, against the one that is chosen
// --libraries FOLDER: where to look for cuBLASLt first.
//
// Times are replays of a CUDA graph over at least 0.5 GB of distinct weights, kernels overlapping as they do in a step; linears
// that leave partial sums to the next kernel are timed so, without it. Shares are of 4.51 TB/s, what an H200 reads at.
#include "cuda_linear_fp8.h"

#include <cstdio>
#include <string>

#include "backends/cuda/linear_gemm.h"
#include "backends/cuda/linear_quantize.h"
#include "backends/cuda/linear_stream.h"
#include "backends/cuda/linear_tiles.h"
#include "cuda_linear_time.h"

namespace maga::bench {
namespace {

using cuda::LinearArgs;

class Timer {
 public:
  Timer() { fill(DType::bf16, x_.at(), static_cast<int64_t>(x_.bytes() / 2), 1.7f, 2, 20); }
  // Fills the weights for a matrix: as many as there is room for.
  void prepare(const Matrix& matrix, bool fp8) {
    const int64_t bytes = fp8 ? code_bytes(matrix.rows(), matrix.k) : matrix.rows() * matrix.k * 2;
    copies_ = static_cast<int>(std::min<int64_t>(static_cast<int64_t>(weights_.bytes()) / bytes, 60));
    bytes_ = bytes;
    for (int i = 0; i < copies_; ++i) {
      if (fp8)
        fill_codes(nullptr, weights_.at(i * bytes), matrix.rows(), matrix.k, 0.015f, i + 1);
      else
        fill(DType::bf16, weights_.at(i * bytes), bytes / 2, 0.03f, i + 1);
    }
    MAGA_CUDA(cudaDeviceSynchronize());
  }
  LinearArgs args(const Matrix& matrix, int m, bool fp8) {
    return {.weight = weights_.at(),
            .layout = {.form = fp8 ? cuda::WeightForm::fp8 : cuda::WeightForm::dense},
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
            .scratch = scratch_.at(),
            .widened = widened_.at()};
  }
  // Microseconds a launch.
  double us(LinearArgs args, const std::function<void(const LinearArgs&)>& run) {
    run(args);  // chooses and loads kernels
    const double flops = 2. * args.m * args.n * args.k * (args.gated ? 2 : 1);
    const int launches = std::clamp(static_cast<int>(1.5e13 / flops), 4, copies_);
    return stopwatch_.us(stream, [&] {
      for (int i = 0; i < launches; ++i) {
        args.weight = weights_.at(i % copies_ * bytes_);
        run(args);
      }
    }) / launches;
  }
  float* slabs() { return static_cast<float*>(slabs_.at()); }

  cudaStream_t stream = make_stream();
  cuda::Linears linears;
  cuda::Gemms gemms;
  cuda::Streams streams;
  cuda::Tiles tiles;

 private:
  DeviceBuffer weights_{1'100'000'000}, x_{size_t{8192} * 14336 * 2}, out_{size_t{8192} * 28672 * 2}, slabs_{size_t{256} << 20},
      scratch_{cuda::linear_scratch_bytes(8192, 14336, DType::bf16)}, widened_{cuda::kWidenedBytes};
  Stopwatch stopwatch_;
  int copies_ = 0;
  int64_t bytes_ = 0;
};

constexpr int kTokens[] = {1, 8, 16, 32, 64, 128, 256, 1024, 8192};

void time_linears(Timer& timer) {
  const cuda::Queue queue{timer.stream, true};
  std::printf("%-8s %5s %9s %7s %8s %9s %9s\n", "", "m", "us", "share", "TFLOP/s", "rounding", "cuBLASLt bf16");
  for (const Matrix& matrix : kLlama3_8B) {
    double own[std::size(kTokens)], rounding[std::size(kTokens)] = {};
    timer.prepare(matrix, true);
    const size_t count = matrix.f32 ? 7 : std::size(kTokens);  // logits are of sequences, not of prompts
    for (size_t i = 0; i < count; ++i) {
      LinearArgs args = timer.args(matrix, kTokens[i], true);
      if (matrix.split && cuda::slabs_of(args) > 0) args.slabs = timer.slabs();
      own[i] = timer.us(args, [&](const LinearArgs& a) { timer.linears.run(queue, a); });
      if (cuda::stream_rounds(kTokens[i])) continue;
      rounding[i] = timer.us(args, [&](const LinearArgs& a) { cuda::linear_quantize(queue, a); });
    }
    timer.prepare(matrix, false);
    for (size_t i = 0; i < count; ++i) {
      LinearArgs args = timer.args(matrix, kTokens[i], false);
      if (args.gated) args.gated = false, args.n *= 2, args.out_stride = args.n;  // without the activation
      const double us = timer.us(args, [&](const LinearArgs& a) { timer.gemms.run({timer.stream, false}, a, a.scratch); });
      std::printf("%-8s %5d %9.2f %7.3f %8.1f %9.2f %9.2f  x%.2f\n", matrix.name, kTokens[i], own[i],
                  static_cast<double>(code_bytes(matrix.rows(), matrix.k)) / kBytesPerUs / own[i],
                  2. * kTokens[i] * static_cast<double>(matrix.rows() * matrix.k) / own[i] / 1e6, rounding[i], us, us / own[i]);
    }
  }
}

void sweep(Timer& timer) {
  const cuda::Queue queue{timer.stream, true};
  for (const Matrix& matrix : kLlama3_8B) {
    timer.prepare(matrix, true);
    for (const int m : kTokens) {
      if (matrix.f32 && m > 256) continue;
      LinearArgs args = timer.args(matrix, m, true);
      if (matrix.split) args.slabs = timer.slabs();
      std::vector<std::pair<double, std::string>> times;  // the chosen one first
      if (m <= 64) {
        std::vector<cuda::StreamConfig> configs = {cuda::choose_stream(timer.streams.shape_of(args))};
        for (const cuda::StreamConfig& config : cuda::stream_configs(timer.streams.shape_of(args))) configs.push_back(config);
        for (const cuda::StreamConfig& c : configs)
          times.emplace_back(timer.us(args, [&](const LinearArgs& a) { timer.streams.run(queue, a, c); }),
                             concat(c.tile.rows, " rows, split ", c.split, ", ", c.ctas * c.split, " CTAs, ", c.stages,
                                    " stages, window ", c.window));
      } else {
        cuda::TileShape shape = timer.tiles.shape_of(args);
        shape.may_split = matrix.split;
        const LinearArgs rounded = cuda::linear_quantize(queue, args);
        for (const cuda::TileConfig& c : cuda::tile_configs(shape)) {
          LinearArgs call = rounded;
          if (c.split == 1) call.slabs = nullptr;
          times.emplace_back(timer.us(call, [&](const LinearArgs& a) { timer.tiles.run(queue, a, c); }),
                             concat(64 * c.tile.groups, " x ", c.tile.rows, c.share_weights ? ", weights" : ", tokens",
                                    " shared, split ", c.split));
        }
      }
      std::printf("%s m %d: chosen %.2f (%s);", matrix.name, m, times[0].first, times[0].second.c_str());
      std::ranges::sort(times);
      for (size_t i = 0; i < std::min<size_t>(times.size(), 4); ++i)
        std::printf(" %.2f (%s)", times[i].first, times[i].second.c_str());
      std::printf("\n");
    }
  }
}

int run(const std::string& mode, const std::string& more) {
  if (mode == "check" && more == "bf16") return check_fp8(make_stream(), false, {DType::bf16}) ? 1 : 0;
  if (mode == "check" && (more.empty() || more == "small"))
    return check_fp8(make_stream(), more == "small", {DType::bf16, DType::f16}) ? 1 : 0;
  if (mode == "error" && more.empty()) return print_fp8_errors(make_stream()), 0;
  if ((mode == "time" || mode == "sweep") && more.empty()) {
    Timer timer;
    mode == "time" ? time_linears(timer) : sweep(timer);
    return 0;
  }
  return -1;
}

}  // namespace
}  // namespace maga::bench

int main(int count, char** words) {
  return maga::bench::run_program(count, words, "cuda_linear_fp8 check [small | bf16] | error | time | sweep", maga::bench::run);
}
