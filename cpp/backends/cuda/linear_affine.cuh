// The kernel of linear_affine.h. Per CTA: a warpgroup whose first two warps bring weights and tokens, and `groups` that make
// numbers of codes and multiply.
//
// Ring step: boxes of kTokens tokens x 64 columns in the 128-byte swizzle, then the units of the CTA's rows x kUnits * 128 columns.
// Of a gated linear the rows alternate between a unit of the gate and its unit of up, so that one thread holds both halves of an
// output.
#pragma once

#include <iterator>
#include <utility>

#include "backends/cuda/launch.cuh"
#include "backends/cuda/linear_affine_args.h"
#include "backends/cuda/linear_affine_lane.cuh"
#include "backends/cuda/linear_affine_store.cuh"
#include "backends/cuda/linear_hopper.cuh"

namespace maga::cuda {

// That an SM must have room for.
constexpr int affine_ctas(int tokens, int groups, int tiles) { return tokens <= 16 && tiles == 1 && groups <= 2 ? 2 : 1; }

// Whether a unit's products are summed apart and meet its scale in fp32: for few tokens that is less work than to scale the
// numbers.
constexpr bool affine_apart(bool plain, int tokens) { return plain && tokens <= 16; }

template <typename T, int kBits, bool kPlain, int kTokens, int kGroups, int kTiles>
__global__ void __launch_bounds__(128 * (kGroups + 1), affine_ctas(kTokens, kGroups, kTiles))
    linear_affine(const AffineArgs a, const __grid_constant__ CUtensorMap weight_map,
                  const __grid_constant__ CUtensorMap token_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using namespace hopper;
  constexpr AffineTile kTile{kTokens, kGroups, kTiles};
  constexpr int kRows = kTile.rows(), kUnits = affine_step_units(kTile, kBits), kTokenBytes = kUnits * 2 * kTokens * 128;
  constexpr bool kMoveRegisters = kGroups == 2 && kTokens * kTiles >= 128, kApart = affine_apart(kPlain, kTokens);
  extern __shared__ uint8_t shared[];
  const uint32_t base = (shared_address(shared) + 1023) & ~1023u, ring = base + kAffineHeader;
  auto weights_there = [&](int slot) { return base + 32 * slot; };
  auto tokens_there = [&](int slot) { return base + 32 * slot + 8; };
  auto read = [&](int slot) { return base + 32 * slot + 16; };
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
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
  const int items = (a.rows + kRows - 1) / kRows * a.token_tiles;  // tiles of rows, and of tokens within them
  const int total = cta < items ? (items - cta + ctas - 1) / ctas * steps : 0;

  if (warp >= 4 * kGroups) {
    if constexpr (kMoveRegisters) leave_registers<40>();
    if (lane != 0 || warp > 4 * kGroups + 1) return;
    int slot = 0, phase = 1;
    if (warp == 4 * kGroups) {  // weights: nothing that a kernel writes, so they need not wait for the kernel before
      const uint64_t policy = a.token_tiles == 1 ? kEvictFirst : kEvictNormal;
      int landed = 0, landed_phase = 0;
      for (int it = 0; it < total; ++it) {
        if (it >= a.stages) barrier_wait(read(slot), phase);
        if (it >= a.window) {
          barrier_wait(weights_there(landed), landed_phase);
          if (++landed == a.stages) landed = 0, landed_phase ^= 1;
        }
        const int item = cta + it / steps * ctas, unit = (first_step + it % steps) * kUnits, row = item / a.token_tiles * kRows;
        const uint32_t to = ring + slot * a.step_bytes + kTokenBytes;
        barrier_expect(weights_there(slot), kRows / kUnitRows * kUnits * a.unit_bytes);
        if (a.gated)
          copy_paired_units(to, &weight_map, unit, row / (2 * kUnitRows), weights_there(slot), policy);
        else
          copy_units(to, &weight_map, unit, row / kUnitRows, weights_there(slot), policy);
        if (++slot == a.stages) slot = 0, phase ^= 1;
      }
    } else {  // tokens
      wait_for_previous();
      for (int it = 0; it < total; ++it) {
        if (it >= a.stages) barrier_wait(read(slot), phase);
        const int item = cta + it / steps * ctas, column = (first_step + it % steps) * kUnits * kUnitColumns;
        barrier_expect(tokens_there(slot), kTokenBytes);
#pragma unroll
        for (int b = 0; b < kUnits * 2; ++b)
          copy_2d(ring + slot * a.step_bytes + b * kTokens * 128, &token_map, column + b * 64, item % a.token_tiles * kTokens,
                  tokens_there(slot), kEvictLast);
        if (++slot == a.stages) slot = 0, phase ^= 1;
      }
    }
    return;
  }

  if constexpr (kMoveRegisters) take_registers<232>();
  const int group = warp / 4;
  const uint32_t next = kUnits * a.unit_bytes;  // from a unit to that of the next eight rows
  int slot = 0, phase = 0;
  for (int item = cta; item < items; item += ctas) {
    float sums[kTiles][kTokens / 2];
    float parts[kApart ? kUnits : 1][kTiles][kApart ? kTokens / 2 : 1], scales[kApart ? kUnits : 1][kTiles][2];  // of a unit
    if constexpr (kApart)
#pragma unroll
      for (int r = 0; r < kTiles; ++r)
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) sums[r][i] = 0;
    auto add_part = [&](int u) {
      if constexpr (kApart)
#pragma unroll
        for (int r = 0; r < kTiles; ++r)
#pragma unroll
          for (int i = 0; i < kTokens / 2; ++i) sums[r][i] += scales[u][r][i / 2 % 2] * parts[u][r][i];
    };
    for (int step = 0; step < steps; ++step) {
      barrier_wait(weights_there(slot), phase);
      barrier_wait(tokens_there(slot), phase);
      const uint32_t tokens = ring + slot * a.step_bytes;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        Lane<T, kBits> mine[kTiles];
        uint32_t units[kTiles];
#pragma unroll
        for (int r = 0; r < kTiles; ++r) {
          units[r] = tokens + kTokenBytes + ((group * kTiles + r) * 8 + warp % 4 * 2) * next + u * a.unit_bytes;
          mine[r].load(units[r], next);
        }
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {  // of 16 columns; the pair before is still in the tensor core
          uint32_t operands[2][kTiles][4];
#pragma unroll
          for (int r = 0; r < kTiles; ++r) {
            mine[r].template load_set<kPlain>(a, units[r], next, pair);
            if constexpr (kApart)
#pragma unroll
              for (int half = 0; half < 2; ++half) scales[u][r][half] = mine[r].scale(half);
#pragma unroll
            for (int half = 0; half < 2; ++half) mine[r].template operand<kApart>(operands[half][r], pair * 2 + half);
          }
          const uint64_t b = wgmma_tile(tokens + (u * 2 + pair / 2) * kTokens * 128) + pair % 2 * 4;
          wgmma_fence();
#pragma unroll
          for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int r = 0; r < kTiles; ++r) {
              const bool adds = pair > 0 || half > 0;
              if constexpr (kApart)
                wgmma(T{}, parts[u][r], operands[half][r], b + half * 2, adds);
              else
                wgmma(T{}, sums[r], operands[half][r], b + half * 2, step > 0 || u > 0 || adds);
            }
          wgmma_commit();
          wgmma_wait<1>();
          if (u > 0 && pair == 0) add_part(u - 1);
        }
      }
      wgmma_wait<0>();  // operands in registers must not be under way across the ring's wait, or every wgmma is serialised
      add_part(kUnits - 1);
      __syncwarp();
      if (lane == 0) barrier_arrive(read(slot));
      if (++slot == a.stages) slot = 0, phase ^= 1;
    }
    wait_for_previous();  // which may still read what we write
    const int in_cta = group * kTiles * 64 + warp % 4 * 16;
    store_affine<T, kRows, kTokens, kTiles>(
        a, sums,
        {.in_cta = in_cta, .row = item / a.token_tiles * kRows + in_cta, .token = item % a.token_tiles * kTokens, .slice = slice});
  }
#endif
}

template <typename T, int kBits, bool kPlain>
AffineKernel affine_kernel(const AffineTile& tile) {
  AffineKernel kernel = nullptr;
  [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    (
        [&] {
          constexpr AffineTile kTile = kAffineTiles[kIndex];
          if constexpr (affine_compiled(kTile, kPlain))
            if (tile == kTile) kernel = linear_affine<T, kBits, kPlain, kTile.tokens, kTile.groups, kTile.tiles>;
        }(),
        ...);
  }(std::make_index_sequence<std::size(kAffineTiles)>());
  return kernel;
}

}  // namespace maga::cuda
