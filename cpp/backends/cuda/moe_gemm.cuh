// The tiles of moe_gemm.h on Hopper. Weights are the 64-row side of wgmma and slots its other side, so that few tokens cost few
// columns. Per CTA: one thread brings weights, one brings slots, kGroups warpgroups multiply; CTAs take tiles in turn, and the ring
// in shared memory runs on from one to the next.
//
// Ring step: boxes of (kRows weight rows | kSlots slots) x 64 columns, 128-byte swizzle. Of a gated linear the rows alternate
// between eight of the gate and eight of up, so that one thread holds both halves of an output.
#pragma once

#include "backends/cuda/launch.cuh"
#include "backends/cuda/linear_hopper.cuh"
#include "backends/cuda/moe_gating.cuh"
#include "backends/cuda/moe_gemm_args.h"
#include "backends/cuda/moe_tiles.cuh"

namespace maga::cuda {

template <typename T, int kSlots, int kRows, int kGroups, int kBoxes>
__global__ void __launch_bounds__(128 * kGroups + 64, kSlots <= 64 ? 2 : 1)
    moe_gemm(const MoeTileArgs a, const __grid_constant__ CUtensorMap weight_map, const __grid_constant__ CUtensorMap slot_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using namespace hopper;
  constexpr int kTiles = (kRows + 64 * kGroups - 1) / (64 * kGroups);  // 64-row tiles of a warpgroup
  constexpr int kBox = (kRows + kSlots) * 128, kStep = kBox * kBoxes;
  constexpr uint64_t kWeightPolicy = kSlots < 128 ? kEvictFirst : kEvictNormal;  // many slots: other CTAs read them too
  extern __shared__ uint8_t shared[];
  __shared__ MoeTiles tiles;
  const uint32_t base = (shared_address(shared) + 1023) & ~1023u, ring = base + kMoeHeader;
  auto weights_there = [&](int place) { return base + 32 * place; };
  auto slots_there = [&](int place) { return base + 32 * place + 8; };
  auto read = [&](int place) { return base + 32 * place + 16; };
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int place = 0; place < a.stages; ++place) {
      barrier_init(weights_there(place), 1);
      barrier_init(slots_there(place), 1);
      barrier_init(read(place), 4 * kGroups);
    }
    barrier_init_fence();
    prefetch_map(&weight_map);
    prefetch_map(&slot_map);
  }
  const int row_tiles = (a.rows + kRows - 1) / kRows;
  // The first linear waits for the counts. It lets the second start only then, which so finds them without waiting, and streams
  // weights while the first ends.
  if (a.first) wait_for_previous();
  allow_next();
  tiles.build(a.counts, a.experts, kSlots, row_tiles);
  __syncthreads();
  const int total = tiles.first_tile[a.experts];

  if (warp == 4 * kGroups) {  // weights
    if (lane != 0) return;
    MoeTile tile{};
    int place = 0, phase = 1;
    bool full = false;
    for (int index = blockIdx.x; index < total; index += gridDim.x) {
      tile = tiles.at(index, tile.expert, kSlots, row_tiles);
      const int row = tile.row_tile * kRows / (a.gated ? 16 : 8);
      for (int step = 0; step < a.steps; ++step) {
        if (full) barrier_wait(read(place), phase);
        barrier_expect(weights_there(place), kRows * 128 * kBoxes);
#pragma unroll
        for (int b = 0; b < kBoxes; ++b)
          copy_5d(ring + place * kStep + b * kBox, &weight_map, (step * kBoxes + b) * 64, row, tile.expert, weights_there(place),
                  kWeightPolicy);
        if (++place == a.stages) place = 0, phase ^= 1, full = true;
      }
    }
    return;
  }
  if (warp > 4 * kGroups) {  // slots
    if (lane != 0) return;
    wait_for_previous();
    MoeTile tile{};
    int place = 0, phase = 1;
    bool full = false;
    for (int index = blockIdx.x; index < total; index += gridDim.x) {
      tile = tiles.at(index, tile.expert, kSlots, row_tiles);
      for (int step = 0; step < a.steps; ++step) {
        if (full) barrier_wait(read(place), phase);
        barrier_expect(slots_there(place), kSlots * 128 * kBoxes);
#pragma unroll
        for (int b = 0; b < kBoxes; ++b)
          copy_2d(ring + place * kStep + b * kBox + kRows * 128, &slot_map, (step * kBoxes + b) * 64, tile.slot, slots_there(place),
                  kEvictLast);
        if (++place == a.stages) place = 0, phase ^= 1, full = true;
      }
    }
    return;
  }

  const int group = warp / 4, g = lane / 4, t = lane % 4;
  MoeTile tile{};
  int place = 0, phase = 0;
  wait_for_previous();  // which may still read what we write
  for (int index = blockIdx.x; index < total; index += gridDim.x) {
    tile = tiles.at(index, tile.expert, kSlots, row_tiles);
    float sums[kTiles][kSlots / 2];
    int before = -1;
    for (int step = 0; step < a.steps; ++step) {
      barrier_wait(weights_there(place), phase);
      barrier_wait(slots_there(place), phase);
      wgmma_fence();
#pragma unroll
      for (int b = 0; b < kBoxes; ++b) {
        const uint32_t box = ring + place * kStep + b * kBox;
        const uint64_t weights = wgmma_tile(box + group * kTiles * 8192), slots = wgmma_tile(box + kRows * 128);
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
          for (int r = 0; r < kTiles; ++r)
            wgmma(T{}, sums[r], weights + k * 2 + r * 512, slots + k * 2, step > 0 || b > 0 || k > 0);
      }
      wgmma_commit();
      wgmma_wait<1>();  // the step before has been read
      if (before >= 0 && lane == 0) barrier_arrive(read(before));
      before = place;
      if (++place == a.stages) place = 0, phase ^= 1;
    }
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(read(before));

    // A warp holds 16 rows of each 64-row tile, from first_row + 64 r on; a thread rows g and g + 8 of them, for slots t * 2,
    // t * 2 + 1 of every eight.
    const int in_cta = group * kTiles * 64 + warp % 4 * 16, first_row = tile.row_tile * kRows + in_cta;
    const T* const bias = a.bias ? static_cast<const T*>(a.bias) + int64_t{tile.expert} * a.rows : nullptr;
    auto bias_of = [&](int row) { return bias && row < a.rows ? static_cast<float>(bias[row]) : 0.f; };
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
      const int row = first_row + r * 64;
      if (in_cta + r * 64 >= kRows || row >= a.rows) continue;
      // Gated: rows 16 i .. 16 i + 7 are gates 8 i .. 8 i + 7, and the next eight are their ups.
      const int n = a.gated ? a.rows / 2 : a.rows, column = a.gated ? row / 2 + g : row + g;
      const float low_bias = bias_of(column), high_bias = bias_of(a.gated ? n + column : column + 8);
      T* const out = static_cast<T*>(a.out) + int64_t{tile.slot} * n + column;
#pragma unroll
      for (int j = 0; j < kSlots / 4; ++j) {
        const int slot = j / 2 * 8 + t * 2 + j % 2, i = j / 2 * 4 + j % 2;
        if (slot >= tile.slots) continue;
        const float low = sums[r][i] + low_bias, high = sums[r][i + 2] + high_bias;
        T* const to = out + int64_t{slot} * n;
        if (a.gated) {
          to[0] = static_cast<T>(gated<false>(a.gating, low, high));
        } else {
          to[0] = static_cast<T>(low);
          if (column + 8 < n) to[8] = static_cast<T>(high);
        }
      }
    }
  }
#endif
}

template <typename T>
MoeKernel moe_kernel(const MoeConfig& config) {
  MoeKernel kernel = nullptr;
  [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    (..., (config == kMoeConfigs[kIndex] ? void(kernel = moe_gemm<T, kMoeConfigs[kIndex].slots, kMoeConfigs[kIndex].rows,
                                                                  kMoeConfigs[kIndex].groups, kMoeConfigs[kIndex].boxes>)
                                         : void()));
  }(std::make_index_sequence<std::size(kMoeConfigs)>());
  return kernel;
}

}  // namespace maga::cuda
