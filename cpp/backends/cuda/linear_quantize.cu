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
  QuantizedTokens to;
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
  *reinterpret_cast<uint4*>(a.to.codes + int64_t{token} * a.k + column) = x[0][0];
  if (lane == 0) a.to.scales[int64_t{run} * a.to.scale_stride + token] = scale[0];
}

template <typename T>
void launch_quantize(const Queue& queue, const QuantizeArgs& call) {
  const int runs = scale_runs(call.k), warps = std::min(runs, kWarps);
  launch(queue, linear_quantize<T>, dim3(call.m, (runs + kWarps - 1) / kWarps), dim3(warps * 32), 0, call);
}

}  // namespace

LinearArgs linear_quantize(const Queue& queue, const LinearArgs& args) {
  MAGA_CHECK(args.type != DType::f32 && args.k % 16 == 0, "e4m3 tokens of ", name_of(args.type), ", ", args.k, " columns");
  const QuantizedTokens to = quantized_tokens(args.widened, args.m, args.k);
  if (!args.rounded) {
    const bool aligned = reinterpret_cast<uintptr_t>(args.x) % 16 == 0 && args.x_stride % 8 == 0;
    const QuantizeArgs call{.x = args.x, .x_stride = args.x_stride, .m = args.m, .k = args.k, .aligned = aligned, .to = to};
    args.type == DType::bf16 ? launch_quantize<__nv_bfloat16>(queue, call) : launch_quantize<__half>(queue, call);
  }
  LinearArgs coded = args;
  coded.x = to.codes, coded.x_stride = args.k, coded.x_scale = to.scales;
  return coded;
}

}  // namespace maga::cuda
