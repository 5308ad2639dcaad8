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

__device__ __forceinline__ uint32_t pack_two(__nv_bfloat16, float a, float b) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(a, b);
  return reinterpret_cast<const uint32_t&>(two);
}
__device__ __forceinline__ uint32_t pack_two(__half, float a, float b) {
  const __half2 two = __floats2half2_rn(a, b);
  return reinterpret_cast<const uint32_t&>(two);
}
// An 8 x 8 matrix of 16 bits, of which lane 4 i + j holds the elements 2 j and 2 j + 1 of row i, by columns: column c to the
// address that lane c gives.
__device__ __forceinline__ void store_columns(uint32_t to, uint32_t two) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(to), "r"(two) : "memory");
}
__device__ __forceinline__ uint4 load_shared_16(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
  return v;
}

// A warp's 16 weight rows from `row` on, times all slots of a tile, to `out`. A thread holds rows g and g + 8, for slots t * 2 and
// t * 2 + 1 of every eight. Of a gated linear these are gates row / 2 + g and their ups. By way of the warp's staging, 64 slots at
// a time: there a slot's eight or 16 columns lie next to each other.
template <typename T, int kSlots>
__device__ __forceinline__ void store_slots(const MoeTileArgs& a, const float (&sums)[kSlots / 2], const MoeTile& tile, int row,
                                            uint32_t staging) {
  constexpr int kAtOnce = kSlots < 64 ? kSlots : 64;
  const int lane = threadIdx.x % 32, g = lane / 4;
  const int n = a.gated ? a.rows / 2 : a.rows, column = a.gated ? row / 2 : row;
  const T* const bias = a.bias ? static_cast<const T*>(a.bias) + int64_t{tile.expert} * a.rows : nullptr;
  float low_bias = 0, high_bias = 0;
  if (bias) {
    low_bias = static_cast<float>(bias[column + g]);
    if (a.gated || column + 8 < n) high_bias = static_cast<float>(bias[(a.gated ? n : 8) + column + g]);
  }
  T* const out = static_cast<T*>(a.out) + int64_t{tile.slot} * n + column;
#pragma unroll
  for (int first = 0; first < kSlots; first += kAtOnce) {
    if (first >= tile.slots) break;
#pragma unroll
    for (int j = 0; j < kAtOnce / 8; ++j) {
      const float* const v = &sums[(first / 8 + j) * 4];
      const float low[2] = {v[0] + low_bias, v[1] + low_bias}, high[2] = {v[2] + high_bias, v[3] + high_bias};
      const uint32_t to = staging + (j * 8 + lane % 8) * (a.gated ? 16 : 32);
      if (a.gated) {
        store_columns(to, pack_two(T{}, gated<false>(a.gating, low[0], high[0]), gated<false>(a.gating, low[1], high[1])));
      } else {
        store_columns(to, pack_two(T{}, low[0], low[1]));
        store_columns(to + 16, pack_two(T{}, high[0], high[1]));
      }
    }
    __syncwarp();
    const int pieces = a.gated ? 1 : 2;  // of 8 columns, a slot
#pragma unroll
    for (int i = 0; i < (2 * kAtOnce + 31) / 32; ++i) {
      const int piece = i * 32 + lane, slot = piece / pieces, at = piece % pieces * 8;
      if (slot < kAtOnce && first + slot < tile.slots && column + at < n)
        *reinterpret_cast<uint4*>(out + int64_t{first + slot} * n + at) = load_shared_16(staging + piece * 16);
    }
    __syncwarp();
  }
}

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
  // The first linear waits for the counts. It lets the second start only then, which so finds them without waiting, and streams
  // weights while the first ends.
  if (a.first) wait_for_previous();
  allow_next();
  const int row_tiles = (a.rows + kRows - 1) / kRows;
  tiles.build(a.counts, a.experts, kSlots, row_tiles);
  __syncthreads();

  if (warp == 4 * kGroups && lane == 0) {  // weights
    MoeTile tile{};
    int place = 0, phase = 1;
    bool full = false;
    for (int index = blockIdx.x; index < tiles.first_tile[a.experts]; index += gridDim.x) {
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
  } else if (warp == 4 * kGroups + 1 && lane == 0) {  // slots
    wait_for_previous();
    MoeTile tile{};
    int place = 0, phase = 1;
    bool full = false;
    for (int index = blockIdx.x; index < tiles.first_tile[a.experts]; index += gridDim.x) {
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
  } else if (warp < 4 * kGroups) {
    const int group = warp / 4;
    MoeTile tile{};
    int place = 0, phase = 0;
    wait_for_previous();  // which may still read what we write
    for (int index = blockIdx.x; index < tiles.first_tile[a.experts]; index += gridDim.x) {
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
      tile = tiles.at(index, tile.expert, kSlots, row_tiles);
      const int in_cta = group * kTiles * 64 + warp % 4 * 16;
      const uint32_t staging = ring + a.stages * kStep + warp * moe_staging_bytes(kSlots);
#pragma unroll
      for (int r = 0; r < kTiles; ++r) {
        const int row = tile.row_tile * kRows + in_cta + r * 64;
        if (in_cta + r * 64 < kRows && row < a.rows) store_slots<T, kSlots>(a, sums[r], tile, row, staging);
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
