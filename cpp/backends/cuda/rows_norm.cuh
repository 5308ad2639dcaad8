// What the kernels of norm share.
#pragma once

#include "backends/cuda/linear_quantize.cuh"
#include "backends/cuda/quantized_tokens.h"
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
  QuantizedTokens rounded;
};

constexpr int kMostShares = 64;  // of a row, those of a warp, 32 vectors each

// Rounds row `row` of `columns` columns for a linear of e4m3 weights. This thread has vectors x[i], from column `first` + i *
// `step` on; the threads of a warp have neighbouring ones. All threads of the CTA must come. `shares`: shared memory.
template <typename T, int N, int V>
__device__ __forceinline__ void round_row(const QuantizedTokens& to, int64_t row, int columns, int first, int step,
                                          const Vector<T, N> (&x)[V], uint32_t (&shares)[kMostShares]) {
  constexpr int kShare = kWarp * N, kSharesOfRun = kScaleColumns / kShare, kWords = N / 2;
  static_assert(kScaleColumns % kShare == 0 && kMostRoundedColumns <= kMostShares * kShare);
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const int column = first + i * step;
    uint32_t largest = column < columns ? largest_of<kWords>(reinterpret_cast<const uint32_t*>(x[i].words)) : 0;
#pragma unroll
    for (int lanes = 1; lanes < kWarp; lanes *= 2) largest = __vmaxu2(largest, __shfl_xor_sync(~0u, largest, lanes));
    if (threadIdx.x % kWarp == 0 && column < columns) shares[column / kShare] = largest;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const int column = first + i * step, run = column / kScaleColumns;
    if (column >= columns) continue;
    uint32_t largest = 0, codes[kWords / 2];
    for (int share = run * kSharesOfRun; share < (run + 1) * kSharesOfRun && share * kShare < columns; ++share)
      largest = __vmaxu2(largest, shares[share]);
    float scale;
    round_words<T, kWords>(reinterpret_cast<const uint32_t*>(x[i].words), largest, &scale, codes);
    auto* const at = reinterpret_cast<uint32_t*>(to.codes + row * columns + column);
#pragma unroll
    for (int w = 0; w < kWords / 2; ++w) at[w] = codes[w];
    if (column % kScaleColumns == 0) to.scales[int64_t{run} * to.scale_stride + row] = scale;
  }
}

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
