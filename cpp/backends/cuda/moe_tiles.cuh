// How the slots of all experts fall into tiles, found anew by every CTA from the counts of rows: what a CTA does follows from the
// index of its tile.
#pragma once

#include "program/ops.h"

namespace maga::cuda {

struct MoeTile {
  int expert;
  int row_tile;  // of the weight's rows
  int slot;      // the first
  int slots;     // of the tile that exist
};

struct MoeTiles {
  // Chunks of an expert's slots that are walked together, so that they meet each tile of the weight while it is in the L2.
  static constexpr int kBand = 16;
  int first_slot[kMostExperts + 1];
  int first_tile[kMostExperts + 1];

  // By all threads of the CTA; the first warp works, and the caller's barrier comes after.
  __device__ void build(const int32_t* counts, int experts, int chunk, int row_tiles) {
    if (threadIdx.x >= 32) return;
    const int lane = threadIdx.x;
    int slots = 0, tiles = 0;
    for (int base = 0; base < experts; base += 32) {
      const int count = base + lane < experts ? counts[base + lane] : 0;
      int sum = count, tile_sum = (count + chunk - 1) / chunk * row_tiles;
      for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(~0u, sum, step), tiles_before = __shfl_up_sync(~0u, tile_sum, step);
        if (lane >= step) sum += before, tile_sum += tiles_before;
      }
      if (base + lane < experts) {
        first_slot[base + lane + 1] = slots + sum;
        first_tile[base + lane + 1] = tiles + tile_sum;
      }
      slots += __shfl_sync(~0u, sum, 31);
      tiles += __shfl_sync(~0u, tile_sum, 31);
    }
    if (lane == 0) first_slot[0] = first_tile[0] = 0;
  }

  // `expert`: that of an earlier tile, or 0.
  __device__ MoeTile at(int tile, int expert, int chunk, int row_tiles) const {
    while (first_tile[expert + 1] <= tile) ++expert;
    const int slots = first_slot[expert + 1] - first_slot[expert], chunks = (slots + chunk - 1) / chunk;
    const int in_expert = tile - first_tile[expert], band = in_expert / (row_tiles * kBand);
    const int width = min(kBand, chunks - band * kBand), in_band = in_expert - band * row_tiles * kBand;
    const int first = (band * kBand + in_band % width) * chunk;
    return {expert, in_band / width, first_slot[expert] + first, min(chunk, slots - first)};
  }
};

}  // namespace maga::cuda
