// What the kernels of norm share.
#pragma once

#include "backends/cuda/rows.cuh"

namespace maga::cuda {

constexpr int kWarp = 32;

template <typename T>
struct NormCall {
  Rows<T> in, out, residual, sum;
  const T* weight;
  const T* bias;
  const float* slabs;
  const T* slab_bias;
  int slab_count;
  int rows, groups, group;  // a row is `groups` runs of `group` columns
  int own;                  // elements from a run's weight and bias to the next run's; 0: all runs share them
  float eps, weight_offset;
};

// Sum over the threads of a run: a warp, or the whole CTA. `shared` (kWarp, 16-byte aligned) is zero past the CTA's warps; it may
// be used again after the next call with another one.
__device__ __forceinline__ float sum_over_run(float x, float* shared) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  const int warps = blockDim.x / kWarp;
  if (warps == 1) return x;
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = x;
  __syncthreads();
  if (warps <= 8) {
    const float4 a = reinterpret_cast<const float4*>(shared)[0], b = reinterpret_cast<const float4*>(shared)[1];
    return ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
  }
  x = shared[threadIdx.x % kWarp];
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

// Before the first sum_over_run.
template <int kCount>
__device__ __forceinline__ void clear_sums(float (&shared)[kCount][kWarp]) {
  if (const int at = threadIdx.x; at < kWarp && at >= blockDim.x / kWarp)
#pragma unroll
    for (int i = 0; i < kCount; ++i) shared[i][at] = 0;
}

// Whole rows in registers, no slabs; false if the rows are too long for that or not of whole vectors.
template <typename T>
bool norm_stream(const Queue& queue, NormKind kind, const NormCall<T>& call);

}  // namespace maga::cuda
