// The kernel of linear_tiles.h. Per CTA: one warpgroup whose first two warps bring weights and tokens, `kGroups` that multiply.
//
// Ring step: (64 * kGroups tokens | kRows weight rows) x 128 bytes of columns, 128-byte swizzle. A slot is free when the warps of
// both CTAs have read it, since either CTA writes to the other. Of a gated linear the rows alternate between eight of the gate and
// eight of up, so that one thread holds both halves of an output.
#pragma once

#include <iterator>
#include <utility>

#include "backends/cuda/launch.cuh"
#include "backends/cuda/linear_activation.cuh"
#include "backends/cuda/linear_hopper.cuh"
#include "backends/cuda/linear_tiles_args.h"
#include "backends/cuda/linear_tiles_store.cuh"

// Older architectures, for which the kernel is empty, do not know the attribute.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define MAGA_IN_PAIRS
#else
#define MAGA_IN_PAIRS __cluster_dims__(2, 1, 1)
#endif

namespace maga::cuda {

struct TileWork {
  int token, row;  // the first of this CTA's tile
  int slice, first_step, steps;
};

__device__ __forceinline__ TileWork tile_work(const TileArgs& a, int item, int rank, int tokens, int rows) {
  const int slice = item % a.split, unit = item / a.split;
  const int band = unit / (a.band * a.row_units), in_band = unit - band * a.band * a.row_units;
  const int token_units = min(a.token_units - band * a.band, a.band);
  const int token = band * a.band + in_band % token_units, row = in_band / token_units;
  const int first_step = a.steps * slice / a.split;
  return {(a.share_weights ? token * 2 + rank : token) * tokens, (a.share_weights ? row : row * 2 + rank) * rows, slice, first_step,
          a.steps * (slice + 1) / a.split - first_step};
}

// The scales of a thread's tokens g and g + 8, a run of steps ahead of their use.
struct TokenScales {
  const float* from[2];
  int stride;
  float ahead[2];

  __device__ __forceinline__ TokenScales(const TileArgs& a, int token, int run) : stride(a.x_scale_stride) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      from[half] = a.x_scale + int64_t{run} * stride + min(token + static_cast<int>(threadIdx.x) % 32 / 4 + half * 8, a.m - 1);
      ahead[half] = *from[half];
    }
  }
  __device__ __forceinline__ void next(float (&now)[2], bool more) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      now[half] = ahead[half];
      if (more) ahead[half] = *(from[half] += stride);
    }
  }
};

template <typename E, typename T, int kGroups, int kRows>
__global__ void MAGA_IN_PAIRS __launch_bounds__(128 * (kGroups + 1), 1)
    linear_tiles(const TileArgs a, const __grid_constant__ CUtensorMap weight_map, const __grid_constant__ CUtensorMap token_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using namespace hopper;
  constexpr Tile kTile{kGroups, kRows};
  constexpr bool kFp8 = sizeof(E) == 1;
  constexpr int kColumns = 128 / sizeof(E);  // of a step
  constexpr int kTokens = 64 * kGroups, kTokenBytes = kTokens * 128, kRowBytes = kRows * 128;
  constexpr int kStep = tile_step_bytes(kTile), kStages = tile_stages(kTile);
  constexpr uint16_t kBoth = 3;
  extern __shared__ uint8_t shared[];
  const uint32_t ring = (shared_address(shared) + 1023) & ~1023u, staging = ring + kStages * kStep;
  const uint32_t barriers = staging + kGroups * 4 * kTileStaging;
  auto there = [&](int slot) { return barriers + 16 * slot; };
  auto read = [&](int slot) { return barriers + 16 * slot + 8; };
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, rank = cluster_rank();
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kStages; ++slot) {
      barrier_init(there(slot), 2);
      barrier_init(read(slot), 2 * 4 * kGroups);
    }
    barrier_init_fence();
    prefetch_map(&weight_map);
    prefetch_map(&token_map);
  }
  cluster_sync();
  allow_next();
  const int clusters = gridDim.x / 2, items = a.token_units * a.row_units * a.split;

  if (warp >= 4 * kGroups) {
    leave_registers<kGroups == 2 ? 40 : 32>();
    if (warp < 4 * kGroups + 2 && lane == 0) {
      const bool weights = warp == 4 * kGroups;
      if (!weights) wait_for_previous();  // weights are nothing that a kernel writes
      const bool shares = weights == a.share_weights;
      int slot = 0, phase = 1;
      for (int item = blockIdx.x / 2; item < items; item += clusters) {
        const TileWork work = tile_work(a, item, rank, kTokens, kRows);
        for (int step = work.first_step; step < work.first_step + work.steps; ++step) {
          barrier_wait(read(slot), phase);
          barrier_expect(there(slot), weights ? kRowBytes : kTokenBytes);
          // Halves: of a shared operand this CTA's for both CTAs, else both for itself.
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if (shares && half != rank) continue;
            const uint32_t to = ring + slot * kStep + (weights ? kTokenBytes + half * kRowBytes / 2 : half * kTokenBytes / 2);
            const int row = weights ? work.row + half * kRows / 2 : work.token + half * kTokens / 2;
            if (!weights) {
              if (shares)
                copy_2d_to_all(to, &token_map, step * kColumns, row, there(slot), kBoth, kEvictNormal);
              else
                copy_2d(to, &token_map, step * kColumns, row, there(slot), kEvictNormal);
            } else if (a.gated) {
              if (shares)
                copy_4d_to_all(to, &weight_map, step * kColumns, row / 16, there(slot), kBoth, a.weight_policy);
              else
                copy_4d(to, &weight_map, step * kColumns, row / 16, there(slot), a.weight_policy);
            } else {
              if (shares)
                copy_2d_to_all(to, &weight_map, step * kColumns, row, there(slot), kBoth, a.weight_policy);
              else
                copy_2d(to, &weight_map, step * kColumns, row, there(slot), a.weight_policy);
            }
          }
          if (++slot == kStages) slot = 0, phase ^= 1;
        }
      }
    }
    __syncwarp();
    cluster_sync();
  } else {
    take_registers<kGroups == 2 ? 232 : 160>();
    const int group = warp / 4;
    auto release = [&](int slot) {
      if (lane < 2) barrier_arrive_there(address_in(lane, read(slot)));
    };
    int slot = 0, phase = 0;
    auto advance = [&] {
      if (++slot == kStages) slot = 0, phase ^= 1;
    };
    auto multiply = [&](float (&sums)[kRows / 2], bool add) {  // a step
      barrier_wait(there(slot), phase);
      const uint64_t tokens = wgmma_tile(ring + slot * kStep + group * 8192);
      const uint64_t weights = wgmma_tile(ring + slot * kStep + kTokenBytes);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) wgmma(E{}, sums, tokens + k * 2, weights + k * 2, add || k > 0);
      wgmma_commit();
    };
    if (kFp8) wait_for_previous();  // for the tokens' scales
    for (int item = blockIdx.x / 2; item < items; item += clusters) {
      const TileWork work = tile_work(a, item, rank, kTokens, kRows);
      if (a.residual) prefetch_residual<T, kRows>(a, work.token + warp * 16, work.row);
      float sums[kRows / 2];
      int before = -1;
      if constexpr (kFp8) {
        // The tensor cores keep about 14 bits of a sum of e4m3 products: a run of steps is summed by itself and added in fp32.
        float run_sums[kRows / 2];
#pragma unroll
        for (float& sum : sums) sum = 0;
        const int end = work.first_step + work.steps;
        TokenScales scales(a, work.token + warp * 16, work.first_step / kScaleSteps);
        for (int step = work.first_step; step < end;) {
          const int run_end = min(step / kScaleSteps * kScaleSteps + kScaleSteps, end);
          float scale[2];
          scales.next(scale, run_end < end);
          for (bool add = false; step < run_end; ++step, add = true) {
            multiply(run_sums, add);
            wgmma_wait<1>();  // the step before has been read
            if (before >= 0) release(before);
            before = slot;
            advance();
          }
          wgmma_wait<0>();
          release(before);
          before = -1;
#pragma unroll
          for (int i = 0; i < kRows / 2; ++i) sums[i] += run_sums[i] * scale[i % 4 / 2];
        }
        scale_rows<kRows / 8>(a, sums, work.row);
      } else {
        for (int step = 0; step < work.steps; ++step) {
          multiply(sums, step > 0);
          wgmma_wait<1>();  // the step before has been read
          if (before >= 0) release(before);
          before = slot;
          advance();
        }
        wgmma_wait<0>();
        release(before);
      }
      wait_for_previous();  // which may still read what we write
      store_tile<T, kGroups, kRows>(a, sums, work.token + warp * 16, work.row, work.slice, staging + warp * kTileStaging);
    }
    cluster_sync();  // this CTA's memory stays until the other has stopped writing to it
  }
#endif
}

template <typename E, typename T, int kGroups>
TileKernel tile_kernel(int rows) {
  TileKernel kernel = nullptr;
  [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    (
        [&] {
          constexpr Tile kTile = kTiles[kIndex];
          if constexpr (kTile.groups == kGroups && has_tile(kTile, sizeof(E) == 1))
            if (rows == kTile.rows) kernel = linear_tiles<E, T, kGroups, kTile.rows>;
        }(),
        ...);
  }(std::make_index_sequence<std::size(kTiles)>());
  return kernel;
}

}  // namespace maga::cuda
