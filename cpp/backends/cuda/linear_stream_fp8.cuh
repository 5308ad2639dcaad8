// Streaming linears with e4m3 weights, for few tokens: as linear_stream.cuh, but tokens are of e4m3 too, so that wgmma takes both
// from shared memory and no weight is ever converted. The fewest come as they are and are rounded by the warps that bring them;
// where that would take longer than the weights do, they come rounded.
//
// Ring step: boxes of (kRows weight rows | kTokens tokens) x 128 columns. The tensor cores keep about 14 bits of a sum of e4m3
// products, so each box is summed by itself and added in fp32, times the tokens' scales of these columns.
#pragma once

#include "backends/cuda/linear_quantize.cuh"
#include "backends/cuda/linear_quantize.h"
#include "backends/cuda/linear_shared.cuh"
#include "backends/cuda/linear_stream_parts.cuh"

namespace maga::cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The warps that round tokens. Each takes every kWarps-th box, so that the warps' waits overlap; eight lanes have a token's 128
// columns. Loads are kAhead boxes ahead.
template <typename T, int kTokens, int kRows, int kGroups, int kBoxes>
__device__ __forceinline__ void round_tokens(const StreamArgs& a, const StreamWork& work, uint32_t barriers, uint32_t ring,
                                             uint32_t scales) {
  using namespace hopper;
  constexpr int kWarps = kRoundingWarps, kEach = kTokens / 4;  // tokens that a lane has part of
  constexpr int kAhead = kEach == 2 || kGroups == 1 ? 2 : 1;
  constexpr int kBox = (kRows + kTokens) * 128;
  const int lane = threadIdx.x % 32, piece = lane % 8;
  const int slice_boxes = work.steps * kBoxes, all = work.total * kBoxes;
  const int first = threadIdx.x / 32 - 4 * kGroups - 1;
  auto token_of = [&](int i) { return i * 4 + lane / 8; };
  uint4 held[kAhead][kEach][2];
  auto ask = [&](uint4(&to)[kEach][2], int box) {
    const int column = (work.first_step * kBoxes + box % slice_boxes) * kStreamScaleColumns + piece * 16;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int token = token_of(i);
      to[i][0] = to[i][1] = uint4{};
      if (box < all && token < a.m && column < a.k)
        load_16(static_cast<const T*>(a.x) + token * a.x_stride + column, a.x_aligned, to[i]);
    }
  };
  wait_for_previous();
#pragma unroll
  for (int d = 0; d < kAhead; ++d) ask(held[d], first + d * kWarps);
  for (int next = first; next < all; next += kAhead * kWarps)
#pragma unroll
    for (int d = 0; d < kAhead; ++d) {
      const int box = next + d * kWarps;
      if (box >= all) break;
      float scale[kEach];
      quantize_16<T, kEach, 8>(held[d], scale);
      const int step = box / kBoxes, use = step / a.stages, slot = step - use * a.stages;
      if (use > 0) barrier_wait(slot_read(barriers, slot), (use - 1) % 2);
      const uint32_t to = ring + (slot * kBoxes + box % kBoxes) * kBox + kRows * 128;
      const uint32_t scale_to = scales + (slot * kBoxes + box % kBoxes) * kTokens * 4;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int token = token_of(i);
        if (token >= a.m) continue;  // what is there makes results that nobody stores
        store_shared(to + token * 128 + (piece ^ token % 8) * 16, held[d][i][0]);
        if (piece == 0) store_shared(scale_to + token * 4, __float_as_uint(scale[i]));
      }
      stored_fence();
      __syncwarp();
      if (lane == 0) barrier_arrive(tokens_there(barriers, slot));
      ask(held[d], box + kAhead * kWarps);
    }
}

// One thread brings tokens that are rounded, and their scales.
template <int kTokens, int kRows, int kBoxes>
__device__ __forceinline__ void bring_rounded(const StreamArgs& a, const StreamWork& work, const CUtensorMap* map,
                                              uint32_t barriers, uint32_t ring, uint32_t scales) {
  using namespace hopper;
  constexpr int kBox = (kRows + kTokens) * 128, kBoxesOfScale = kScaleColumns / kStreamScaleColumns;
  const int stride = (a.m + 3) / 4 * 4;
  wait_for_previous();
  int slot = 0, phase = 1;
  for (int it = 0; it < work.total; ++it) {
    if (it >= a.stages) barrier_wait(slot_read(barriers, slot), phase);
    barrier_expect(tokens_there(barriers, slot), (kTokens * 128 + stride * 4) * kBoxes);
    const int first = (work.first_step + it % work.steps) * kBoxes;
#pragma unroll
    for (int b = 0; b < kBoxes; ++b) {
      const int box = slot * kBoxes + b, run = min((first + b) / kBoxesOfScale, a.x_runs - 1);
      copy_2d(ring + box * kBox + kRows * 128, map, (first + b) * kStreamScaleColumns, 0, tokens_there(barriers, slot), kEvictLast);
      copy_bytes(scales + box * kTokens * 4, a.x_scale + run * stride, stride * 4, tokens_there(barriers, slot));
    }
    if (++slot == a.stages) slot = 0, phase ^= 1;
  }
}

#endif

template <typename T, int kTokens, int kRows, int kGroups, int kBoxes>
__global__ void __launch_bounds__(stream_threads({kRows, kGroups, kBoxes}, kTokens, true),
                                  stream_fp8_ctas({kRows, kGroups, kBoxes}, kTokens))
    linear_stream_fp8(const StreamArgs a, const __grid_constant__ CUtensorMap weight_map,
                      const __grid_constant__ CUtensorMap token_map) {
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
    init_ring(barriers, a.stages, stream_rounds(kTokens) ? kBoxes : 1, 4 * kGroups);
    prefetch_map(&weight_map);
    if (!stream_rounds(kTokens)) prefetch_map(&token_map);
  }
  __syncthreads();
  allow_next();

  const StreamWork work = StreamWork::of<kRows>(a);
  if (warp == 4 * kGroups) {
    if (lane == 0) bring_weights<kRows, kBoxes, kBox, kStreamScaleColumns>(a, work, &weight_map, barriers, ring);
    return;
  }
  if (warp > 4 * kGroups) {
    if constexpr (stream_rounds(kTokens))
      round_tokens<T, kTokens, kRows, kGroups, kBoxes>(a, work, barriers, ring, scales);
    else if (lane == 0)
      bring_rounded<kTokens, kRows, kBoxes>(a, work, &token_map, barriers, ring, scales);
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
StreamKernel stream_fp8_kernel(int rows) {
  StreamKernel kernel = nullptr;
  [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    (
        [&] {
          constexpr StreamTile kTile = kStreamTiles[kIndex];
          if constexpr (stream_has_fp8(kTile, kTokens))
            if (rows == kTile.rows) kernel = linear_stream_fp8<T, kTokens, kTile.rows, kTile.groups, kTile.boxes>;
        }(),
        ...);
  }(std::make_index_sequence<std::size(kStreamTiles)>());
  return kernel;
}

}  // namespace maga::cuda
