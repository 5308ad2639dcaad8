// The kernel of linear_mma.h.
//
// Ring step: tokens by blocks of 128 columns, (kTokens, 16 pieces of 16 bytes), piece c of token i at place c ^ i % 8, so that
// ldmatrix meets no bank twice; then each warp's own units, which it alone copies and reads. A warp has 16 rows of each 64, as on
// Hopper; of a gated linear these are eight gates and their eight ups.
#pragma once

#include <iterator>
#include <utility>

#include "backends/cuda/launch.cuh"
#include "backends/cuda/linear_affine_lane.cuh"
#include "backends/cuda/linear_affine_store.cuh"
#include "backends/cuda/linear_mma_args.h"
#include "backends/cuda/linear_mma_copy.cuh"

namespace maga::cuda {

// A tile: rows of a weight, and tokens [first, end).
struct MmaItem {
  int row_tile, first, end, expert;
};

template <typename T, int kCode, bool kPlain, int kTokens, int kTiles>
__global__ void __launch_bounds__(kMmaThreads, kTokens <= 32 ? 2 : 1) linear_mma(const MmaArgs a) {
#if __CUDA_ARCH__ >= 800
  constexpr int kUnits = mma_step_units(kTokens, kCode == 4 ? 4 : 8), kBlock = kTokens * 256;
  constexpr int kPlainBytes = Lane<T, kCode>::kCodeBytes + kUnitRows * (kCode == kE4m3 ? 4 : 2);
  const int unit_bytes = kPlain ? kPlainBytes : a.unit_bytes, next = kUnits * unit_bytes;
  extern __shared__ __align__(128) uint8_t shared[];
  MoeTiles& tiles = *reinterpret_cast<MoeTiles*>(shared);
  const uint32_t ring = shared_address(shared) + (a.counts ? kMmaTables : 0);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rows_deep = kMmaWarps / a.deep;
  const int turn = warp % a.deep, row_warp = warp / a.deep;

  // Experts' linears: the first waits for the counts, and lets the second start only then, see moe_gemm.cuh.
  if (a.counts && a.first) wait_for_previous();
  allow_next();
  if (a.counts) {
    tiles.build(a.counts, a.experts, kTokens, a.row_tiles);
    __syncthreads();
  }
  const int slice = blockIdx.x % a.split, cta = blockIdx.x / a.split, ctas = gridDim.x / a.split;
  const int first_step = a.steps * slice / a.split, steps = a.steps * (slice + 1) / a.split - first_step;
  const int items = a.counts ? tiles.first_tile[a.experts] : a.row_tiles * a.token_tiles;
  const int total = cta < items ? (items - cta + ctas - 1) / ctas * steps : 0;
  auto item_at = [&](int index, int expert) -> MmaItem {
    if (!a.counts) return {index / a.token_tiles, index % a.token_tiles * kTokens, a.m, 0};
    const MoeTile tile = tiles.at(index, expert, kTokens, a.row_tiles);
    return {tile.row_tile, tile.slot, tile.slot + tile.slots, tile.expert};
  };
  auto row_of = [&](const MmaItem& item) {  // the warp's first
    return item.row_tile * rows_deep * 16 * kTiles + row_warp / 4 * 64 * kTiles + row_warp % 4 * 16;
  };

  const uint64_t policy = weight_policy(a.counts ? kTokens < 64 : a.token_tiles == 1);
  const int down = (a.rows + kUnitRows - 1) / kUnitRows, block_count = a.deep * kUnits;
  const uint32_t own_units = block_count * kBlock + warp * kTiles * 2 * next;
  auto load_weights = [&](const MmaItem& item, int step, uint32_t slot) {
    const int unit = ((first_step + step) * a.deep + turn) * kUnits;
    const int there = max(0, min(kUnits, a.across - unit)) * unit_bytes;
    const int64_t expert_row = int64_t{item.expert} * down;
#pragma unroll
    for (int r = 0; r < kTiles; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int sixteen = row_of(item) / 16 + r * 4;
        const int unit_row = a.gated ? half * (down / 2) + sixteen : sixteen * 2 + half;
        const int bytes = (a.gated ? sixteen < down / 2 : unit_row < down) ? there : 0;
        const uint8_t* const from = a.weight + (bytes > 0 ? ((expert_row + unit_row) * a.across + unit) * unit_bytes : 0);
        for (int at = lane * 16; at < next; at += 512)
          copy_some(slot + own_units + (r * 2 + half) * next + at, at < bytes ? from + at : a.weight, at < bytes ? 16 : 0, policy);
      }
  };
  auto load_tokens = [&](const MmaItem& item, int step, uint32_t slot) {
    const int first_column = (first_step + step) * block_count * kUnitColumns;
    for (int i = threadIdx.x; i < block_count * kTokens * 16; i += kMmaThreads) {
      const int piece = i % 16, token = i / 16 % kTokens, block = i / 16 / kTokens;
      const int column = first_column + block * kUnitColumns + piece * 8, row = item.first + token;
      const int left = row < item.end ? max(0, min(8, a.k - column)) : 0;
      const T* const from = static_cast<const T*>(a.x) + (left > 0 ? row * a.x_stride + column : 0);
      const uint32_t to = slot + block * kBlock + token * 256 + (piece ^ token % 8) * 16;
      if (a.x_aligned)
        copy_some(to, from, left * 2);
      else
        copy_slowly(to, from, left);
    }
  };

  struct Cursor {
    int index, step;
    MmaItem item;
  };
  auto begin = [&]() -> Cursor { return {cta, 0, total > 0 ? item_at(cta, 0) : MmaItem{}}; };
  auto advance = [&](Cursor& at) {
    if (++at.step < steps) return;
    at.step = 0;
    at.index += ctas;
    if (at.index < items) at.item = item_at(at.index, at.item.expert);
  };
  auto slot_of = [&](int slot) { return ring + slot * a.step_bytes; };

  // Weights are nothing that a kernel writes, so they need not wait for the kernel before.
  Cursor ahead = begin();
  const int early = min(a.stages - 1, total);
  for (int it = 0; it < early; ++it, advance(ahead)) load_weights(ahead.item, ahead.step, slot_of(it));
  wait_for_previous();
  ahead = begin();
  for (int it = 0; it < a.stages - 1; ++it) {
    if (it < early) {
      load_tokens(ahead.item, ahead.step, slot_of(it));
      advance(ahead);
    }
    copy_commit();
  }

  // Whether a unit's products are summed apart and meet its scale in fp32: for few tokens that is less work than to scale the
  // numbers, and for e4m3 exact.
  constexpr bool kApart = kCode == kE4m3 || (kPlain && kTokens <= 32);
  float sums[kTiles][kTokens / 2];
  Cursor now = begin();
  int slot = 0, free = a.stages - 1;
  for (int it = 0; it < total; ++it) {
    wait_for_step(a.stages);
    __syncthreads();
    if (it + a.stages - 1 < total) {
      load_weights(ahead.item, ahead.step, slot_of(free));
      load_tokens(ahead.item, ahead.step, slot_of(free));
      advance(ahead);
    }
    copy_commit();
    if (now.step == 0)
#pragma unroll
      for (int r = 0; r < kTiles; ++r)
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) sums[r][i] = 0;

#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const uint32_t block = slot_of(slot) + (turn * kUnits + u) * kBlock + lane % 8 * 256;
      Lane<T, kCode> mine[kTiles];
      uint32_t units[kTiles];
      float parts[kApart ? kTiles : 1][kApart ? kTokens / 2 : 1] = {};
#pragma unroll
      for (int r = 0; r < kTiles; ++r) {
        units[r] = slot_of(slot) + own_units + r * 2 * next + u * unit_bytes;
        mine[r].load(units[r], next);
      }
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {  // of 16 columns
        uint32_t operands[2][kTiles][4];
#pragma unroll
        for (int r = 0; r < kTiles; ++r) {
          mine[r].template load_set<kPlain>(a, units[r], next, pair);
#pragma unroll
          for (int half = 0; half < 2; ++half) mine[r].template operand<kApart>(operands[half][r], pair * 2 + half);
        }
#pragma unroll
        for (int j = 0; j < kTokens / 8; ++j) {
          uint32_t b[4];
          load_matrices(b, block + j * 8 * 256 + ((pair * 4 + lane / 8) ^ lane % 8) * 16);
#pragma unroll
          for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int r = 0; r < kTiles; ++r) {
              float* const d = kApart ? &parts[r][j * 4] : &sums[r][j * 4];
              Tensor<T>::mma(*reinterpret_cast<float (*)[4]>(d), operands[half][r], b[half * 2], b[half * 2 + 1]);
            }
        }
      }
      if constexpr (kApart)
#pragma unroll
        for (int r = 0; r < kTiles; ++r)
#pragma unroll
          for (int i = 0; i < kTokens / 2; ++i) sums[r][i] += mine[r].scale(i / 2 % 2) * parts[r][i];
    }

    if (now.step == steps - 1) {
      if (kTiles == 1 && a.deep > 1) {
        // The ring's barriers are between what the first reads here and what others write for the next tile.
        float* const area = reinterpret_cast<float*>(shared + (ring - shared_address(shared)) + a.stages * a.step_bytes) + lane;
        if (turn > 0)
#pragma unroll
          for (int i = 0; i < kTokens / 2; ++i) area[(((turn - 1) * rows_deep + row_warp) * (kTokens / 2) + i) * 32] = sums[0][i];
        __syncthreads();
        for (int from = 0; turn == 0 && from < a.deep - 1; ++from)
#pragma unroll
          for (int i = 0; i < kTokens / 2; ++i) sums[0][i] += area[((from * rows_deep + row_warp) * (kTokens / 2) + i) * 32];
      }
      if (turn == 0) {
        MmaArgs to = a;
        to.m = now.item.end;
        if (a.bias) to.bias = static_cast<const T*>(a.bias) + int64_t{now.item.expert} * a.rows;
        if (const int row = row_of(now.item); row < a.rows)
          store_affine<T, kTiles * 64, kTokens, kTiles>(to, sums,
                                                        {.in_cta = 0, .row = row, .token = now.item.first, .slice = slice});
      }
    }
    advance(now);
    slot = slot + 1 == a.stages ? 0 : slot + 1;
    free = free + 1 == a.stages ? 0 : free + 1;
  }
#endif
}

template <typename T, int kCode, bool kPlain>
MmaKernel mma_kernel(const MmaTile& tile) {
  MmaKernel kernel = nullptr;
  [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    (
        [&] {
          constexpr MmaTile kTile = kMmaTiles[kIndex];
          if constexpr (mma_compiled(kTile, kCode, kPlain))
            if (tile == kTile) kernel = linear_mma<T, kCode, kPlain, kTile.tokens, kTile.tiles>;
        }(),
        ...);
  }(std::make_index_sequence<std::size(kMmaTiles)>());
  return kernel;
}

}  // namespace maga::cuda
