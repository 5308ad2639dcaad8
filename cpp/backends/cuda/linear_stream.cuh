// The kernel of linear_stream.h. Per CTA: one thread streams weights, one brings tokens, `kGroups` warpgroups multiply.
//
// Ring step: boxes of (kRows weight rows | kTokens tokens) x 64 columns, 128-byte swizzle. Of a gated linear the rows alternate
// between eight of the gate and eight of up, so that one thread holds both halves of an output.
#pragma once

#include "backends/cuda/linear_stream_parts.cuh"

namespace maga::cuda {

template <typename T, int kTokens, int kRows, int kGroups, int kBoxes>
__global__ void __launch_bounds__(128 * kGroups + 64, 1)
    linear_stream(const StreamArgs a, const __grid_constant__ CUtensorMap weight_map,
                  const __grid_constant__ CUtensorMap token_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using namespace hopper;
  constexpr int kTiles = (kRows + 64 * kGroups - 1) / (64 * kGroups);  // 64-row tiles of a warpgroup
  constexpr int kBox = (kRows + kTokens) * 128, kStep = kBox * kBoxes;
  extern __shared__ uint8_t shared[];
  const uint32_t barriers = (shared_address(shared) + 1023) & ~1023u, ring = barriers + kStreamHeader;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    init_ring(barriers, a.stages, 1, 4 * kGroups);
    prefetch_map(&weight_map);
    prefetch_map(&token_map);
  }
  __syncthreads();
  allow_next();

  const StreamWork work = StreamWork::of<kRows>(a);
  if (warp == 4 * kGroups) {
    if (lane == 0) bring_weights<kRows, kBoxes, kBox, 64>(a, work, &weight_map, barriers, ring);
    return;
  }
  if (warp > 4 * kGroups) {  // tokens
    if (lane != 0) return;
    wait_for_previous();
    int slot = 0, phase = 1;
    for (int it = 0; it < work.total; ++it) {
      if (it >= a.stages) barrier_wait(slot_read(barriers, slot), phase);
      barrier_expect(tokens_there(barriers, slot), kTokens * 128 * kBoxes);
      const int column = (work.first_step + it % work.steps) * 64 * kBoxes;
#pragma unroll
      for (int b = 0; b < kBoxes; ++b)
        copy_2d(ring + slot * kStep + b * kBox + kRows * 128, &token_map, column + b * 64, 0, tokens_there(barriers, slot),
                kEvictLast);
      if (++slot == a.stages) slot = 0, phase ^= 1;
    }
    return;
  }

  int slot = 0, phase = 0;
  for (int tile = work.cta; tile < work.tiles; tile += work.ctas) {
    float sums[kTiles][kTokens / 2];
    int before = -1;
    for (int step = 0; step < work.steps; ++step) {
      barrier_wait(weights_there(barriers, slot), phase);
      barrier_wait(tokens_there(barriers, slot), phase);
      wgmma_fence();
#pragma unroll
      for (int b = 0; b < kBoxes; ++b) {
        const uint32_t box = ring + slot * kStep + b * kBox;
        const uint64_t weights = wgmma_tile(box + warp / 4 * kTiles * 8192), tokens = wgmma_tile(box + kRows * 128);
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
          for (int r = 0; r < kTiles; ++r)
            wgmma(T{}, sums[r], weights + k * 2 + r * 512, tokens + k * 2, step > 0 || b > 0 || k > 0);
      }
      wgmma_commit();
      wgmma_wait<1>();  // the step before has been read
      if (before >= 0 && lane == 0) barrier_arrive(slot_read(barriers, before));
      before = slot;
      if (++slot == a.stages) slot = 0, phase ^= 1;
    }
    wgmma_wait<0>();
    if (before >= 0 && lane == 0) barrier_arrive(slot_read(barriers, before));
    wait_for_previous();  // which may still read what we write
    store_stream<T, kRows, kTokens, kTiles>(a, sums, stream_place<kRows, kTiles>(work, tile));
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
