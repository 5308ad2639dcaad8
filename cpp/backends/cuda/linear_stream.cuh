// The kernel of linear_stream.h. Per CTA: one thread streams weights, one brings tokens, `kGroups` warpgroups multiply.
//
// Ring step: boxes of (kRows weight rows | kTokens tokens) x 64 columns, 128-byte swizzle. Of a gated linear the rows alternate
// between eight of the gate and eight of up, so that one thread holds both halves of an output.
#pragma once

#include "backends/cuda/launch.cuh"
#include "backends/cuda/linear_hopper.cuh"
#include "backends/cuda/linear_stream_args.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "build for 90a, not for 90: wgmma belongs to sm_90a"
#endif

namespace maga::cuda {

template <ActivationKind kKind>
__device__ __forceinline__ float activate(float x) {
  if constexpr (kKind == ActivationKind::silu) return x / (1.f + __expf(-x));
  if constexpr (kKind == ActivationKind::gelu) return 0.5f * x * (1.f + erff(x * 0.70710678f));
  if constexpr (kKind == ActivationKind::gelu_tanh) {
    const float u = 0.79788456f * (x + 0.044715f * x * x * x);
    return x * (1.f - 1.f / (1.f + __expf(2.f * u)));  // 0.5 x (1 + tanh u)
  }
  const float y = fmaxf(x, 0.f);
  return kKind == ActivationKind::relu2 ? y * y : y;
}

template <typename T, int kTokens, int kRows, int kGroups, int kBoxes>
__global__ void __launch_bounds__(128 * kGroups + 64, 1)
    linear_stream(const StreamArgs a, const __grid_constant__ CUtensorMap weight_map,
                  const __grid_constant__ CUtensorMap token_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using namespace hopper;
  constexpr int kTiles = (kRows + 64 * kGroups - 1) / (64 * kGroups);  // 64-row tiles of a warpgroup
  constexpr int kBox = (kRows + kTokens) * 128, kStep = kBox * kBoxes;
  extern __shared__ uint8_t shared[];
  const uint32_t base = (shared_address(shared) + 1023) & ~1023u, ring = base + kStreamHeader;
  auto weights_there = [&](int slot) { return base + 32 * slot; };
  auto tokens_there = [&](int slot) { return base + 32 * slot + 8; };
  auto read = [&](int slot) { return base + 32 * slot + 16; };
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < a.stages; ++slot) {
      barrier_init(weights_there(slot), 1);
      barrier_init(tokens_there(slot), 1);
      barrier_init(read(slot), 4 * kGroups);
    }
    barrier_init_fence();
    prefetch_map(&weight_map);
    prefetch_map(&token_map);
  }
  __syncthreads();
  allow_next();

  const int slice = blockIdx.x % a.split, cta = blockIdx.x / a.split, ctas = gridDim.x / a.split;
  const int first_step = a.steps * slice / a.split, steps = a.steps * (slice + 1) / a.split - first_step;
  const int tiles = (a.rows + kRows - 1) / kRows;
  const int total = cta < tiles ? (tiles - cta + ctas - 1) / ctas * steps : 0;
  auto column = [&](int it) { return (first_step + it % steps) * 64 * kBoxes; };

  if (warp == 4 * kGroups) {  // weights: nothing that a kernel writes, so they need not wait for the kernel before
    if (lane != 0) return;
    int slot = 0, phase = 1, landed = 0, landed_phase = 0;
    for (int it = 0; it < total; ++it) {
      if (it >= a.stages) barrier_wait(read(slot), phase);
      if (it >= a.window) {
        barrier_wait(weights_there(landed), landed_phase);
        if (++landed == a.stages) landed = 0, landed_phase ^= 1;
      }
      const int row = (cta + it / steps * ctas) * kRows;
      barrier_expect(weights_there(slot), kRows * 128 * kBoxes);
#pragma unroll
      for (int b = 0; b < kBoxes; ++b) {
        const uint32_t to = ring + slot * kStep + b * kBox;
        if (a.gated)
          copy_4d(to, &weight_map, column(it) + b * 64, row / 16, weights_there(slot), kEvictFirst);
        else
          copy_2d(to, &weight_map, column(it) + b * 64, row, weights_there(slot), kEvictFirst);
      }
      if (++slot == a.stages) slot = 0, phase ^= 1;
    }
    return;
  }
  if (warp > 4 * kGroups) {  // tokens
    if (lane != 0) return;
    wait_for_previous();
    int slot = 0, phase = 1;
    for (int it = 0; it < total; ++it) {
      if (it >= a.stages) barrier_wait(read(slot), phase);
      barrier_expect(tokens_there(slot), kTokens * 128 * kBoxes);
#pragma unroll
      for (int b = 0; b < kBoxes; ++b)
        copy_2d(ring + slot * kStep + b * kBox + kRows * 128, &token_map, column(it) + b * 64, 0, tokens_there(slot), kEvictLast);
      if (++slot == a.stages) slot = 0, phase ^= 1;
    }
    return;
  }

  const int group = warp / 4, g = lane / 4, t = lane % 4;
  int slot = 0, phase = 0;
  for (int tile = cta; tile < tiles; tile += ctas) {
    float sums[kTiles][kTokens / 2];
    int before = -1;
    for (int step = 0; step < steps; ++step) {
      barrier_wait(weights_there(slot), phase);
      barrier_wait(tokens_there(slot), phase);
      wgmma_fence();
#pragma unroll
      for (int b = 0; b < kBoxes; ++b) {
        const uint32_t box = ring + slot * kStep + b * kBox;
        const uint64_t weights = wgmma_tile(box + group * kTiles * 8192), tokens = wgmma_tile(box + kRows * 128);
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
          for (int r = 0; r < kTiles; ++r)
            wgmma(T{}, sums[r], weights + k * 2 + r * 512, tokens + k * 2, step > 0 || b > 0 || k > 0);
      }
      wgmma_commit();
      wgmma_wait<1>();  // the step before has been read
      if (before >= 0 && lane == 0) barrier_arrive(read(before));
      before = slot;
      if (++slot == a.stages) slot = 0, phase ^= 1;
    }
    wgmma_wait<0>();
    if (before >= 0 && lane == 0) barrier_arrive(read(before));

    wait_for_previous();  // which may still read what we write
    // A warp holds 16 rows of each 64-row tile, from first_row + 64 r on; a thread rows g and g + 8 of them, for tokens t * 2,
    // t * 2 + 1 of every eight.
    const int in_cta = group * kTiles * 64 + warp % 4 * 16, first_row = tile * kRows + in_cta;
    auto store = [&](auto&& put) {  // put(token, r, value of row g, of row g + 8)
#pragma unroll
      for (int r = 0; r < kTiles; ++r)
        if (in_cta + r * 64 < kRows && first_row + r * 64 < a.rows)
#pragma unroll
          for (int j = 0; j < kTokens / 4; ++j) {
            const int token = j / 2 * 8 + t * 2 + j % 2, i = j / 2 * 4 + j % 2;
            if (token < a.m) put(token, r, sums[r][i], sums[r][i + 2]);
          }
    };
    const T* const bias = static_cast<const T*>(a.bias);
    if (a.gated) {
      // Rows 16 i .. 16 i + 7 are gates 8 i .. 8 i + 7, and the next eight are their ups.
      auto gated = [&]<ActivationKind kKind>() {
        store([&](int token, int r, float gate, float up) {
          const int column = (first_row + r * 64) / 2 + g;
          if (bias) gate += static_cast<float>(bias[column]), up += static_cast<float>(bias[a.rows / 2 + column]);
          static_cast<T*>(a.out)[token * a.out_stride + column] = static_cast<T>(activate<kKind>(gate) * up);
        });
      };
      switch (a.activation) {
        case ActivationKind::silu: gated.template operator()<ActivationKind::silu>(); break;
        case ActivationKind::gelu: gated.template operator()<ActivationKind::gelu>(); break;
        case ActivationKind::gelu_tanh: gated.template operator()<ActivationKind::gelu_tanh>(); break;
        case ActivationKind::relu: gated.template operator()<ActivationKind::relu>(); break;
        case ActivationKind::relu2: gated.template operator()<ActivationKind::relu2>(); break;
      }
    } else if (a.slabs) {
      float* const slab = a.slabs + static_cast<int64_t>(slice) * a.m * a.rows;
      store([&](int token, int r, float low, float high) {
        const int row = first_row + r * 64 + g;
        float* const to = slab + static_cast<int64_t>(token) * a.rows + row;
        if (row < a.rows) to[0] = low;
        if (row + 8 < a.rows) to[8] = high;
      });
    } else {
      auto finish = [&](int token, int row, float value) {
        if (row >= a.rows) return;
        if (bias) value += static_cast<float>(bias[row]);
        if (a.residual) value += static_cast<float>(static_cast<const T*>(a.residual)[token * a.residual_stride + row]);
        if (a.out_f32)
          static_cast<float*>(a.out)[token * a.out_stride + row] = value;
        else
          static_cast<T*>(a.out)[token * a.out_stride + row] = static_cast<T>(value);
      };
      store([&](int token, int r, float low, float high) {
        const int row = first_row + r * 64 + g;
        finish(token, row, low);
        finish(token, row + 8, high);
      });
    }
  }
#endif
}

template <typename T, int kTokens>
StreamKernel stream_kernel(int rows) {
  StreamKernel kernel = nullptr;
  [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    (...,
     (rows == kStreamTiles[kIndex].rows
          ? void(kernel =
                     linear_stream<T, kTokens, kStreamTiles[kIndex].rows, kStreamTiles[kIndex].groups, kStreamTiles[kIndex].boxes>)
          : void()));
  }(std::make_index_sequence<std::size(kStreamTiles)>());
  return kernel;
}

}  // namespace maga::cuda
