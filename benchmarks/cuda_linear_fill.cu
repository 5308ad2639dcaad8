#include "cuda_linear.h"

namespace maga::bench {
namespace {

constexpr int kThreads = 256;

__global__ void fill_kernel(DType type, void* data, int64_t count, float scale, uint32_t seed, float outlier) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads) {
    const float value = uniform(i, seed) * scale * (i % 97 == 5 ? outlier : 1.f);
    if (type == DType::f16)
      static_cast<__half*>(data)[i] = __float2half(value);
    else if (type == DType::bf16)
      static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16(value);
    else
      static_cast<float*>(data)[i] = value;
  }
}

}  // namespace

void fill(DType type, void* data, int64_t count, float scale, uint32_t seed, float outlier) {
  const int64_t blocks = std::min<int64_t>((count + kThreads - 1) / kThreads, 4096);
  fill_kernel<<<static_cast<unsigned>(blocks), kThreads>>>(type, data, count, scale, seed, outlier);
  MAGA_CUDA(cudaGetLastError());
}

}  // namespace maga::bench
