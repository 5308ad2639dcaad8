// Checks the linears of e4m3 weights: every kernel, tile and epilogue against sums in double of the same codes and of tokens
// rounded as the kernels round them.
#include <cuda_fp8.h>

#include <array>

#include "backends/cuda/rows.h"
#include "cuda_linear_checker.cuh"
#include "cuda_linear_fp8.h"

namespace maga::bench {
namespace {

constexpr int kThreads = 256;

__global__ void fill_codes_kernel(uint8_t* codes, int64_t rows, int64_t columns, float deviation, uint32_t seed) {
  constexpr float kSize = 0.2f * 448;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < rows * columns; i += int64_t{gridDim.x} * kThreads) {
    const float sum = uniform(i, seed) + uniform(i, seed + 101) + uniform(i, seed + 202);  // deviates by 1
    codes[i] = __nv_cvt_float_to_fp8(sum * kSize, __NV_SATFINITE, __NV_E4M3);
  }
  auto* const scales = reinterpret_cast<float*>(codes + rows * columns);
  for (int64_t r = blockIdx.x * int64_t{kThreads} + threadIdx.x; r < rows; r += int64_t{gridDim.x} * kThreads)
    scales[r] = deviation / kSize * (1 + 0.5f * uniform(r, seed + 303));
}

__device__ float code_value(uint8_t code) { return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3))); }

// dense (rows, columns)
__global__ void widen_codes(const uint8_t* codes, int64_t rows, int64_t columns, float* dense) {
  const auto* scales = reinterpret_cast<const float*>(codes + rows * columns);
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < rows * columns; i += int64_t{gridDim.x} * kThreads)
    dense[i] = code_value(codes[i]) * scales[i / columns];
}

// tokens (m, k), those from `from` on: as the kernels round them, by `columns` columns.
__global__ void round_tokens(LinearArgs a, int from, int columns, float* tokens) {
  const int first = blockIdx.x * columns, end = min(first + columns, a.k), token = from + blockIdx.y;
  auto value = [&](int column) { return static_cast<float>(value_at(a.type, a.x, token * a.x_stride + column)); };
  __shared__ float largest[kThreads];
  float most = 1e-30f;
  for (int column = first + threadIdx.x; column < end; column += kThreads) most = fmaxf(most, fabsf(value(column)));
  largest[threadIdx.x] = most;
  __syncthreads();
  for (const float other : largest) most = fmaxf(most, other);
  const float inverse = __fdividef(448.f, most), scale = most * (1 / 448.f);
  for (int column = first + threadIdx.x; column < end; column += kThreads)
    tokens[int64_t{token} * a.k + column] =
        code_value(__nv_cvt_float_to_fp8(value(column) * inverse, __NV_SATFINITE, __NV_E4M3)) * scale;
}

// Half a unit in the last place, and what the tensor cores drop of sums that are far larger than the result.
Limits limits_of_codes(const Case& c, bool) {
  const bool exact = c.slabs || c.out_f32, bf16 = c.type == DType::bf16;
  return {(exact ? 0.f : bf16 ? 4e-3f : 6e-4f) + (c.gated ? 1e-1f : 1e-2f), exact ? 6e-4 : bf16 ? 2.5e-3 : 1e-3};
}

// A checker whose weights are codes.
struct CodedChecker {
  explicit CodedChecker(cudaStream_t stream) : checker(stream) {
    checker.outlier = 20;  // as in real models
    checker.limits = limits_of_codes;
    checker.weights = [this, stream](const Case& c, uint32_t seed, LinearArgs* call) {
      const int64_t rows = c.gated ? 2 * c.n : c.n;
      MAGA_CHECK(code_bytes(rows, c.k) <= static_cast<int64_t>(codes_.bytes()), c.name());
      fill_codes(stream, codes_.at(), rows, c.k, 1.f / std::sqrt(static_cast<float>(c.k)), seed);
      widen_codes<<<512, kThreads, 0, stream>>>(static_cast<uint8_t*>(codes_.at()), rows, c.k, static_cast<float*>(dense_.at()));
      call->weight = codes_.at();
      call->layout = {.form = cuda::WeightForm::fp8};
      return Numbers{DType::f32, dense_.at(), c.k};
    };
    checker.tokens = [this, stream](const LinearArgs& call) {
      MAGA_CHECK(int64_t{call.m} * call.k * 4 <= static_cast<int64_t>(tokens_.bytes()), call.m, " x ", call.k);
      const int most = checker.tiles_take(call) ? call.m : 64;  // at a time
      for (int from = 0; from < call.m; from += most) {
        const int count = std::min(most, call.m - from), columns = cuda::stream_rounds(count) ? 128 : cuda::kScaleColumns;
        round_tokens<<<dim3((call.k + columns - 1) / columns, count), kThreads, 0, stream>>>(call, from, columns,
                                                                                             static_cast<float*>(tokens_.at()));
      }
      return Numbers{DType::f32, tokens_.at(), call.k};
    };
  }
  Checker checker;

 private:
  DeviceBuffer codes_{32 << 20}, dense_{128 << 20}, tokens_{32 << 20};
};

// Norms that round their rows must leave the bits that linear_quantize() makes of them. Returns the failures.
int check_norms(cudaStream_t stream, bool small, DType type) {
  constexpr int kMostRows = 1000, kMostSlabs = 5, kWidest = cuda::kMostRoundedColumns;
  constexpr size_t kRowsBytes = size_t{kMostRows} * kWidest * 2;
  const DeviceBuffer in(kRowsBytes), out(kRowsBytes), sum(kRowsBytes), weight(kWidest * 2), bias(kWidest * 2),
      slabs(kRowsBytes * 2 * kMostSlabs), rounded(kRowsBytes), again(kRowsBytes);
  const cuda::Queue queue{stream, false};
  int cases = 0, failures = 0;
  for (const int width : {16, 272, 576, 1040, 2048, 4096, 5120, kWidest})
    for (const int rows : {17, 64, 133, 300, kMostRows})
      for (const int count : {0, 2, kMostSlabs})
        for (const NormKind kind : {NormKind::rms, NormKind::layer}) {
          if ((small && rows * width > 40'000) || count * rows * width > kMostSlabs * 133 * kWidest) continue;
          fill(type, in.at(), int64_t{rows} * width, 1.7f, ++cases, 20);
          fill(type, weight.at(), width, 1.f, cases + 1);
          fill(type, bias.at(), width, 1.f, cases + 2);
          if (count > 0) fill(DType::f32, slabs.at(), int64_t{count} * rows * width, 1.7f, cases + 3);
          cuda::NormArgs args{.in = {in.at(), width},
                              .out = {out.at(), width},
                              .rows = rows,
                              .width = width,
                              .group = width,
                              .weight = weight.at(),
                              .bias = kind == NormKind::layer ? bias.at() : nullptr,
                              .kind = kind,
                              .eps = 1e-5f,
                              .rounded = cuda::quantized_tokens(rounded.at(), rows, width)};
          if (count > 0)
            args.slabs = {.data = static_cast<const float*>(slabs.at()), .count = count}, args.residual = args.in,
            args.sum = {sum.at(), width};
          const auto bytes = static_cast<size_t>(cuda::quantized_bytes(rows, width));
          for (const DeviceBuffer* to : {&rounded, &again}) MAGA_CUDA(cudaMemsetAsync(to->at(), 0, bytes, stream));
          MAGA_CHECK(cuda::norm_rounds(type, args), width, " columns");
          norm(queue, type, args);
          cuda::linear_quantize(
              queue, {.x = out.at(), .x_stride = width, .m = rows, .n = 8, .k = width, .type = type, .widened = again.at()});
          std::vector<char> got(bytes), expected(bytes);
          MAGA_CUDA(cudaMemcpyAsync(got.data(), rounded.at(), bytes, cudaMemcpyDeviceToHost, stream));
          MAGA_CUDA(cudaMemcpyAsync(expected.data(), again.at(), bytes, cudaMemcpyDeviceToHost, stream));
          MAGA_CUDA(cudaStreamSynchronize(stream));
          if (got == expected) continue;
          ++failures;
          std::printf("WRONG norm of %d x %d, %s, %d slabs: not what linear_quantize makes of it\n", rows, width,
                      name_of(type).data(), count);
        }
  std::printf("%d norms that round, %d failures\n", cases, failures);
  return failures;
}

constexpr ActivationKind kActivations[] = {ActivationKind::silu, ActivationKind::gelu, ActivationKind::gelu_tanh,
                                           ActivationKind::relu};

}  // namespace

void fill_codes(cudaStream_t stream, void* codes, int64_t rows, int64_t columns, float deviation, uint32_t seed) {
  fill_codes_kernel<<<2048, kThreads, 0, stream>>>(static_cast<uint8_t*>(codes), rows, columns, deviation, seed);
  MAGA_CUDA(cudaGetLastError());
}

int check_fp8(cudaStream_t stream, bool small, const std::vector<DType>& types) {
  CodedChecker coded(stream);
  Checker& checker = coded.checker;
  for (const DType type : types) {
    // Through Linears: every epilogue and alignment.
    for (const auto& [n, k] : {std::pair{960, 576}, {16, 48}, {1008, 80}, {2048, 2048}, {272, 1040}})
      for (const int m : {1, 3, 8, 9, 16, 17, 32, 33, 64, 65, 130, 192, 300}) {
        if ((small && (m % 8 == 0 || n > 300)) || (n > 1500 && type != DType::bf16)) continue;
        auto with = [&](auto&& change) {
          Case c{.type = type, .m = m, .n = n, .k = k};
          change(c);
          checker.check(c);
        };
        with([](Case&) {});
        with([](Case& c) { c.bias = true, c.residual = Case::in_place; });
        with([](Case& c) { c.out_f32 = true, c.out_pad = 3; });
        with([](Case& c) { c.slabs = true; });
        with([](Case& c) { c.x_shift = 16, c.x_pad = 64, c.out_shift = 8, c.out_pad = 8, c.residual = Case::in_place; });
        with([](Case& c) { c.x_shift = 1, c.x_pad = 3, c.out_shift = 3, c.out_pad = 5, c.bias = true; });
        for (const ActivationKind kind : kActivations)
          with([&](Case& c) { c.gated = true, c.activation = kind, c.bias = kind != ActivationKind::relu; });
      }
    // Every streaming configuration, on sizes that leave tiles, boxes and tokens part empty.
    for (const int m : {1, 5, 8, 13, 16, 30, 32, 47, 64}) {
      if (small && m % 8 == 0) continue;
      for (const bool slabs : {false, true})
        for (const auto& config :
             cuda::stream_configs({.m = m, .rows = 1200, .k = 1072, .may_split = slabs, .sms = 132, .fp8 = true}))
          if (slabs == (config.split > 1)) checker.check({.type = type, .m = m, .n = 1200, .k = 1072, .slabs = slabs}, config);
      for (const auto& config :
           cuda::stream_configs({.m = m, .rows = 2 * 600, .k = 656, .may_split = false, .sms = 2, .fp8 = true}))
        checker.check({.type = type, .m = m, .n = 600, .k = 656, .gated = true}, config);
    }
    // Every tile, sharing either operand.
    for (const cuda::Tile& tile : cuda::kTiles)
      for (const bool share_weights : {true, false})
        for (const auto [m, n, k] : {std::array{65, 1208, 1040}, {100, 48, 80}, {385, 520, 528}, {520, 4112, 272}}) {
          if (!cuda::has_tile(tile, true) || (small && m > 100)) continue;
          auto with = [&](int split, auto&& change) {
            Case c{.type = type, .m = m, .n = n, .k = k};
            change(c);
            checker.check(c, cuda::TileConfig{tile, share_weights, split});
          };
          with(1, [](Case& c) { c.bias = true, c.residual = Case::in_place, c.out_pad = 8, c.x_shift = 8, c.x_pad = 16; });
          with(1, [](Case& c) { c.gated = true, c.bias = true, c.out_pad = 8; });
          with(1, [](Case& c) { c.out_f32 = true; });
          if (k >= 256 && m < 500) with(2, [](Case& c) { c.slabs = true; });
        }
  }
  int failures = checker.report();
  for (const DType type : types) failures += check_norms(stream, small, type);
  return failures;
}

void print_fp8_errors(cudaStream_t stream) {
  CodedChecker rounded(stream), exact(stream);
  exact.checker.tokens = nullptr;
  exact.checker.limits = [](const Case&, bool) { return Limits{1e30f}; };
  for (const int m : {8, 300}) {
    const Case c{.type = DType::bf16, .m = m, .n = 512, .k = 14336, .out_f32 = true};
    const double sums = rounded.checker.check(c), rounding = exact.checker.check(c);
    std::printf("m %d, k 14336: relative error of the sums %.2e, of rounding the tokens %.2e\n", m, sums, rounding);
  }
}

}  // namespace maga::bench
