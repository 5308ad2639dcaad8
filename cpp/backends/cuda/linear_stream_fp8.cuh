// Streaming linears with e4m3 weights, for few tokens: as linear_stream.cuh, but tokens come as they are and are rounded to e4m3 by
// the warps that bring them, so that wgmma takes both from shared memory and no weight is ever converted.
//
// Ring step: boxes of (kRows weight rows | kTokens tokens) x 128 columns. The tensor cores keep about 14 bits of a sum of e4m3
// products, so each box is summed by itself and added in fp32, times the tokens' scales of these columns.
#pragma once

#include "backends/cuda/linear_quantize.cuh"
#include "backends/cuda/linear_shared.cuh"
#include "backends/cuda/linear_stream_parts.cuh"

namespace maga::cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The warps that bring tokens. Each takes every kWarps-th unit, up to 32 tokens of a box, so that the warps' waits overlap; eight
// lanes have a token's 128 columns. Loads are kAhead units ahead.
template <typename T, int kTokens, int kRows, int kGroups, int kBoxes>
__device__ __forceinline__ void bring_tokens_fp8(const StreamArgs& a, const StreamWork& work, uint32_t barriers, uint32_t ring,
                                                 uint32_t scales) {
  using namespace hopper;
  constexpr int kWarps = kStreamFp8TokenWarps, kUnits = stream_fp8_units(kTokens);  // of a box
  constexpr int kEach = kTokens / kUnits / 4;                                       // tokens that a lane has part of
  constexpr int kAhead = kEach == 2 || (kEach == 4 && kGroups == 1) ? 2 : 1;
  constexpr int kBox = (kRows + kTokens) * 128;
  const int lane = threadIdx.x % 32, piece = lane % 8;
  const int slice_units = work.steps * kBoxes * kUnits, all = work.total * kBoxes * kUnits;
  const int first = threadIdx.x / 32 - 4 * kGroups - 1;
  auto token_of = [&](int unit, int i) { return unit % kUnits * 32 + i * 4 + lane / 8; };
  uint4 held[kAhead][kEach][2];
  auto ask = [&](uint4(&to)[kEach][2], int unit) {
    const int column = (work.first_step * kBoxes + unit % slice_units / kUnits) * kStreamScaleColumns + piece * 16;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int token = token_of(unit, i);
      to[i][0] = to[i][1] = uint4{};
      if (unit < all && token < a.m && column < a.k)
        load_16(static_cast<const T*>(a.x) + token * a.x_stride + column, a.x_aligned, to[i]);
    }
  };
  wait_for_previous();
#pragma unroll
  for (int d = 0; d < kAhead; ++d) ask(held[d], first + d * kWarps);
  for (int next = first; next < all; next += kAhead * kWarps)
#pragma unroll
    for (int d = 0; d < kAhead; ++d) {
      const int unit = next + d * kWarps;
      if (unit >= all) break;
      float scale[kEach];
      quantize_16<T, kEach, 8>(held[d], scale);
      const int box = unit / kUnits, step = box / kBoxes, use = step / a.stages, slot = step - use * a.stages;
      if (use > 0) barrier_wait(slot_read(barriers, slot), (use - 1) % 2);
      const uint32_t to = ring + (slot * kBoxes + box % kBoxes) * kBox + kRows * 128;
      const uint32_t scale_to = scales + (slot * kBoxes + box % kBoxes) * kTokens * 4;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int token = token_of(unit, i);
        if (token >= a.m) continue;  // what is there makes results that nobody stores
        store_shared(to + token * 128 + (piece ^ token % 8) * 16, held[d][i][0]);
        if (piece == 0) store_shared(scale_to + token * 4, __float_as_uint(scale[i]));
      }
      stored_fence();
      __syncwarp();
      if (lane == 0) barrier_arrive(tokens_there(barriers, slot));
      ask(held[d], unit + kAhead * kWarps);
    }
}

#endif

template <typename T, int kTokens, int kRows, int kGroups, int kBoxes>
__global__ void __launch_bounds__(128 * kGroups + 32 + 32 * kStreamFp8TokenWarps, kTokens <= 16 ? 2 : 1)
    linear_stream_fp8(const StreamArgs a, const __grid_constant__ CUtensorMap weight_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using namespace hopper;
  constexpr int kTiles = (kRows + 64 * kGroups - 1) / (64 * kGroups);  // 64-row tiles of a warpgroup
  constexpr int kBox = (kRows + kTokens) * 128;
  constexpr int kSlack = stream_slack_bytes({kRows, kGroups, kBoxes});
  extern __shared__ uint8_t shared[];
  const uint32_t barriers = (shared_address(shared) + 1023) & ~1023u, ring = barriers + kStreamHeader;
  const uint32_t scales = ring + a.stages * kBoxes * kBox + kSlack;  // (stages, kBoxes, kTokens)
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    init_ring(barriers, a.stages, kBoxes * stream_fp8_units(kTokens), 4 * kGroups);
    prefetch_map(&weight_map);
  }
  __syncthreads();
  allow_next();

  const StreamWork work = StreamWork::of<kRows>(a);
  if (warp == 4 * kGroups) {
    if (lane == 0) bring_weights<kRows, kBoxes, kBox, kStreamScaleColumns>(a, work, &weight_map, barriers, ring);
    return;
  }
  if (warp > 4 * kGroups) {
    bring_tokens_fp8<T, kTokens, kRows, kGroups, kBoxes>(a, work, barriers, ring, scales);
    return;
  }

  const int g = lane / 4, t = lane % 4;
  int slot = 0, phase = 0;
  for (int tile = work.cta; tile < work.tiles; tile += work.ctas) {
    const StreamPlace place = stream_place<kRows, kTiles>(work, tile);
    float row_scales[kTiles][2];  // of rows g and g + 8
#pragma unroll
    for (int r = 0; r < kTiles; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int first = place.row + r * 64;
        const int row = a.gated ? first / 2 + g + half * (a.rows / 2) : first + g + half * 8;
        row_scales[r][half] = row < a.rows ? a.weight_scale[row] : 0.f;
      }
    float total[kTiles][kTokens / 2] = {};
    for (int step = 0; step < work.steps; ++step) {
      barrier_wait(weights_there(barriers, slot), phase);
      barrier_wait(tokens_there(barriers, slot), phase);
      float sums[kBoxes][kTiles][kTokens / 2];
      wgmma_fence();
#pragma unroll
      for (int b = 0; b < kBoxes; ++b) {
        const uint32_t box = ring + (slot * kBoxes + b) * kBox;
        const uint64_t weights = wgmma_tile(box + warp / 4 * kTiles * 8192), tokens = wgmma_tile(box + kRows * 128);
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
          for (int r = 0; r < kTiles; ++r) wgmma(__nv_fp8_e4m3{}, sums[b][r], weights + k * 2 + r * 512, tokens + k * 2, k > 0);
      }
      wgmma_commit();
      float2 token_scales[kBoxes][kTokens / 8];  // of tokens t * 2, t * 2 + 1 of every eight
#pragma unroll
      for (int b = 0; b < kBoxes; ++b)
#pragma unroll
        for (int j = 0; j < kTokens / 8; ++j)
          token_scales[b][j] = load_shared_2(scales + (((slot * kBoxes + b) * kTokens) + j * 8 + t * 2) * 4);
      wgmma_wait<0>();
      __syncwarp();
      if (lane == 0) barrier_arrive(slot_read(barriers, slot));
      if (++slot == a.stages) slot = 0, phase ^= 1;
#pragma unroll
      for (int b = 0; b < kBoxes; ++b)
#pragma unroll
        for (int r = 0; r < kTiles; ++r)
#pragma unroll
          for (int i = 0; i < kTokens / 2; ++i)
            total[r][i] += sums[b][r][i] * (i % 2 == 0 ? token_scales[b][i / 4].x : token_scales[b][i / 4].y);
    }
#pragma unroll
    for (int r = 0; r < kTiles; ++r)
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) total[r][i] *= row_scales[r][i % 4 / 2];
    wait_for_previous();  // which may still read what we write
    store_stream<T, kRows, kTokens, kTiles>(a, total, place);
  }
#endif
}

template <typename T, int kTokens>
StreamFp8Kernel stream_fp8_kernel(int rows) {
  StreamFp8Kernel kernel = nullptr;
  [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    (
        [&] {
          constexpr StreamTile kTile = kStreamTiles[kIndex];
          if constexpr (stream_has_fp8(kTile))
            if (rows == kTile.rows) kernel = linear_stream_fp8<T, kTokens, kTile.rows, kTile.groups, kTile.boxes>;
        }(),
        ...);
  }(std::make_index_sequence<std::size(kStreamTiles)>());
  return kernel;
}

}  // namespace maga::cuda
