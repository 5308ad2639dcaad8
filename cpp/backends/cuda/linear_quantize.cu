#include "backends/cuda/linear_quantize.h"

#include <algorithm>

#include "backends/cuda/launch.cuh"
#include "backends/cuda/linear_quantize.cuh"

namespace maga::cuda {
namespace {

constexpr int kWarps = 8;  // of a CTA; each rounds a run of columns of a token

struct QuantizeArgs {
  const void* x;  // (m, k) of T
  int64_t x_stride;
  int m, k;
  bool aligned;  // to 16 bytes
  void* codes;   // (m, k)
  float* scale;  // (runs of columns, scale_stride)
  int scale_stride;
};

template <typename T>
__global__ void __launch_bounds__(kWarps * 32) linear_quantize(const QuantizeArgs a) {
  static_assert(kScaleColumns == 32 * 16);
  allow_next();
  const int lane = threadIdx.x % 32, token = blockIdx.x, run = blockIdx.y * kWarps + threadIdx.x / 32;
  const int column = run * kScaleColumns + lane * 16;
  uint4 x[1][2] = {};
  wait_for_previous();
  if (column < a.k) load_16(static_cast<const T*>(a.x) + token * a.x_stride + column, a.aligned, x[0]);
  float scale[1];
  quantize_16<T, 1, 32>(x, scale);
  if (column >= a.k) return;
  *reinterpret_cast<uint4*>(static_cast<uint8_t*>(a.codes) + int64_t{token} * a.k + column) = x[0][0];
  if (lane == 0) a.scale[int64_t{run} * a.scale_stride + token] = scale[0];
}

// A CTA rounds a token by one scale; it reads the token twice, the second time from the L1.
template <typename T>
__global__ void __launch_bounds__(kWarps * 32) linear_quantize_whole(const QuantizeArgs a) {
  allow_next();
  __shared__ uint32_t of_warps[kWarps];
  const int token = blockIdx.x, first = threadIdx.x * 16, step = kWarps * 32 * 16;
  const T* const from = static_cast<const T*>(a.x) + token * a.x_stride;
  uint4 x[2];
  wait_for_previous();
  uint32_t largest = 0;
  for (int column = first; column < a.k; column += step) {
    load_16(from + column, a.aligned, x);
    largest = __vmaxu2(largest, largest_of(x));
  }
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) largest = __vmaxu2(largest, __shfl_xor_sync(~0u, largest, lanes));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (const uint32_t other : of_warps) largest = __vmaxu2(largest, other);
  float scale = 0;
  for (int column = first; column < a.k; column += step) {
    load_16(from + column, a.aligned, x);
    *reinterpret_cast<uint4*>(static_cast<uint8_t*>(a.codes) + int64_t{token} * a.k + column) = round_16<T>(x, largest, &scale);
  }
  if (threadIdx.x == 0) a.scale[token] = scale;  // the first thread has columns
}

template <typename T>
void launch_quantize(const Queue& queue, const QuantizeArgs& call, bool whole) {
  if (whole) return launch(queue, linear_quantize_whole<T>, dim3(call.m), dim3(kWarps * 32), 0, call);
  const int runs = scale_runs(call.k), warps = std::min(runs, kWarps);
  launch(queue, linear_quantize<T>, dim3(call.m, (runs + kWarps - 1) / kWarps), dim3(warps * 32), 0, call);
}

}  // namespace

LinearArgs linear_quantize(const Queue& queue, const LinearArgs& args, void* to, bool whole) {
  MAGA_CHECK(args.type != DType::f32 && args.k % 16 == 0, "e4m3 tokens of ", name_of(args.type), ", ", args.k, " columns");
  auto* const scale = reinterpret_cast<float*>(static_cast<std::byte*>(to) + int64_t{args.m} * args.k);
  const QuantizeArgs call{.x = args.x,
                          .x_stride = args.x_stride,
                          .m = args.m,
                          .k = args.k,
                          .aligned = reinterpret_cast<uintptr_t>(args.x) % 16 == 0 && args.x_stride % 8 == 0,
                          .codes = to,
                          .scale = scale,
                          .scale_stride = quantized_scale_stride(args.m)};
  args.type == DType::bf16 ? launch_quantize<__nv_bfloat16>(queue, call, whole) : launch_quantize<__half>(queue, call, whole);
  LinearArgs rounded = args;
  rounded.x = to, rounded.x_stride = args.k, rounded.x_scale = scale;
  return rounded;
}

}  // namespace maga::cuda
