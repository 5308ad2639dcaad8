// What the streaming kernels of every weight form share: a CTA's share of the work, its weights' way into the ring.
#pragma once

#include "backends/cuda/launch.cuh"
#include "backends/cuda/linear_hopper.cuh"
#include "backends/cuda/linear_stream_args.h"
#include "backends/cuda/linear_stream_store.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "build for 90a, not for 90: wgmma belongs to sm_90a"
#endif

namespace maga::cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A slot of the ring has three barriers: its weights are there, its tokens are there, both have been read.
__device__ __forceinline__ uint32_t weights_there(uint32_t barriers, int slot) { return barriers + 32 * slot; }
__device__ __forceinline__ uint32_t tokens_there(uint32_t barriers, int slot) { return barriers + 32 * slot + 8; }
__device__ __forceinline__ uint32_t slot_read(uint32_t barriers, int slot) { return barriers + 32 * slot + 16; }

__device__ __forceinline__ void init_ring(uint32_t barriers, int stages, int token_arrivals, int readers) {
  for (int slot = 0; slot < stages; ++slot) {
    hopper::barrier_init(weights_there(barriers, slot), 1);
    hopper::barrier_init(tokens_there(barriers, slot), token_arrivals);
    hopper::barrier_init(slot_read(barriers, slot), readers);
  }
  hopper::barrier_init_fence();
}

// What a CTA does: row tiles cta, cta + ctas, ... of a slice of k, `total` ring steps in all.
struct StreamWork {
  int slice, cta, ctas, first_step, steps, tiles, total;

  template <int kRows>
  __device__ __forceinline__ static StreamWork of(const StreamArgs& a) {
    StreamWork w;
    w.slice = blockIdx.x % a.split, w.cta = blockIdx.x / a.split, w.ctas = gridDim.x / a.split;
    w.first_step = a.steps * w.slice / a.split, w.steps = a.steps * (w.slice + 1) / a.split - w.first_step;
    w.tiles = (a.rows + kRows - 1) / kRows;
    w.total = w.cta < w.tiles ? (w.tiles - w.cta + w.ctas - 1) / w.ctas * w.steps : 0;
    return w;
  }
};

// One thread streams all weights; nothing that a kernel writes, so it need not wait for the kernel before. kColumns: of a box.
template <int kRows, int kBoxes, int kBox, int kColumns>
__device__ __forceinline__ void bring_weights(const StreamArgs& a, const StreamWork& work, const CUtensorMap* map,
                                              uint32_t barriers, uint32_t ring) {
  using namespace hopper;
  int slot = 0, phase = 1, landed = 0, landed_phase = 0;
  for (int it = 0; it < work.total; ++it) {
    if (it >= a.stages) barrier_wait(slot_read(barriers, slot), phase);
    if (it >= a.window) {
      barrier_wait(weights_there(barriers, landed), landed_phase);
      if (++landed == a.stages) landed = 0, landed_phase ^= 1;
    }
    const int row = (work.cta + it / work.steps * work.ctas) * kRows;
    const int column = (work.first_step + it % work.steps) * kColumns * kBoxes;
    barrier_expect(weights_there(barriers, slot), kRows * 128 * kBoxes);
#pragma unroll
    for (int b = 0; b < kBoxes; ++b) {
      const uint32_t to = ring + (slot * kBoxes + b) * kBox;
      if (a.gated)
        copy_4d(to, map, column + b * kColumns, row / 16, weights_there(barriers, slot), kEvictFirst);
      else
        copy_2d(to, map, column + b * kColumns, row, weights_there(barriers, slot), kEvictFirst);
    }
    if (++slot == a.stages) slot = 0, phase ^= 1;
  }
}

// Where the sums of a row tile belong: a warp holds 16 rows of each of its warpgroup's kTiles 64-row tiles.
template <int kRows, int kTiles>
__device__ __forceinline__ StreamPlace stream_place(const StreamWork& work, int tile) {
  const int warp = threadIdx.x / 32, in_cta = warp / 4 * kTiles * 64 + warp % 4 * 16;
  return {.in_cta = in_cta, .row = tile * kRows + in_cta, .token = 0, .slice = work.slice};
}

#endif

}  // namespace maga::cuda
