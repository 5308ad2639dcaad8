#include "backends/cuda/linear_finish.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "backends/cuda/launch.cuh"

namespace maga::cuda {
namespace {

constexpr int kThreads = 256;

template <typename T, typename Out>
__global__ void finish(const LinearArgs args) {
  allow_next();
  wait_for_previous();
  const int column = blockIdx.x * kThreads + threadIdx.x;
  if (column >= args.n) return;
  const float bias = args.bias ? static_cast<float>(static_cast<const T*>(args.bias)[column]) : 0.f;
  for (int64_t row = blockIdx.y; row < args.m; row += gridDim.y) {
    Out& out = static_cast<Out*>(args.out)[row * args.out_stride + column];
    float value = static_cast<float>(out) + bias;
    if (args.residual) value += static_cast<float>(static_cast<const T*>(args.residual)[row * args.residual_stride + column]);
    out = static_cast<Out>(value);
  }
}

}  // namespace

void linear_finish(const Queue& queue, const LinearArgs& args) {
  const dim3 grid((args.n + kThreads - 1) / kThreads, std::min(args.m, 1024));
  MAGA_CHECK(args.out_type == DType::f32 && args.type != DType::f32, "nothing to finish");
  launch(queue, args.type == DType::bf16 ? finish<__nv_bfloat16, float> : finish<__half, float>, grid, dim3(kThreads), 0, args);
}

}  // namespace maga::cuda
