// The plan of a step: which sequences are in which work list, the blocks before each, and where every CTA begins.
#include "backends/cuda/attention_plan.h"
#include "backends/cuda/launch.cuh"

namespace maga::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kLeastKeys = 128;  // of a CTA: below, merging costs more than it saves
constexpr int kWholeKeys = 384;  // a tile of so few is not cut into pieces

__device__ int tile_blocks(const WorkSequence& s, const WorkShape& shape, const WorkList& list, int tile) {
  const TileKeys keys = tile_keys(s, shape, tile, list.rows);
  return divide_up(keys.high, list.block_keys) - keys.low / list.block_keys;
}

// Inclusive sums of two counts over the CTA; `total` gets those of all.
__device__ int2 scan(int2 value, int2* warp_sums, int2& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  auto over_warp = [&](int2 v) {
    for (int step = 1; step < 32; step *= 2) {
      const int x = __shfl_up_sync(~0u, v.x, step), y = __shfl_up_sync(~0u, v.y, step);
      if (lane >= step) v.x += x, v.y += y;
    }
    return v;
  };
  value = over_warp(value);
  if (lane == 31) warp_sums[warp] = value;
  __syncthreads();
  if (warp == 0) warp_sums[lane] = over_warp(warp_sums[lane]);
  __syncthreads();
  if (warp > 0) value.x += warp_sums[warp - 1].x, value.y += warp_sums[warp - 1].y;
  total = warp_sums[31];
  __syncthreads();
  return value;
}

// One CTA a list. (grid 2)
__global__ void __launch_bounds__(kThreads) attention_plan_kernel(DeviceStep step, PlanArgs args) {
  __shared__ int2 warp_sums[32];
  __shared__ int work[kThreads];  // blocks of a sequence; later the pieces of its tiles
  // The list again, where the step has no more sequences than this.
  __shared__ int near_before[kThreads];
  __shared__ WorkSequence near_sequences[kThreads];
  wait_for_previous();
  const bool many = blockIdx.x == 1, near = args.sequences <= kThreads;
  const WorkList list = many ? args.many : args.few;
  if (list.ctas == 0) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, kv_heads = args.shape.kv_heads;
  const auto listed = [&](int tokens) {
    return tokens > 0 && (args.few.ctas == 0 || (tokens * args.shape.group > args.few.rows) == many);
  };

  int2 done = {0, 0};  // sequences in the list, blocks
  int slot = 0, blocks = 0;
  for (int base = 0; base < args.sequences; base += kThreads) {
    const int i = base + threadIdx.x;
    WorkSequence s;
    if (i < args.sequences) {
      s = {step.sequence_start[i], step.sequence_start[i + 1], step.kv_length[i], step.page_start[i]};
      s.tokens -= s.first_token;
    }
    if (many) {
      // A warp adds up the tiles of one sequence.
      near_sequences[threadIdx.x] = s;
      __syncthreads();
      for (int j = warp; j < min(kThreads, args.sequences - base); j += kThreads / 32) {
        const WorkSequence other = near_sequences[j];
        int sum = 0;
        if (listed(other.tokens))
          for (int tile = lane; tile < tiles_of(other, args.shape.group, list.rows); tile += 32)
            sum += tile_blocks(other, args.shape, list, tile);
        for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
        if (lane == 0) work[j] = sum * kv_heads;
      }
      __syncthreads();
      blocks = i < args.sequences ? work[threadIdx.x] : 0;
    } else {
      blocks = listed(s.tokens) ? tile_blocks(s, args.shape, list, 0) * kv_heads : 0;
    }
    int2 total;
    const int2 sum = scan({blocks > 0, blocks}, warp_sums, total);
    slot = done.x + sum.x - 1;
    if (blocks > 0) {
      list.sequences[slot] = s;
      list.before[slot] = done.y + sum.y - blocks;
      if (near) near_sequences[slot] = s, near_before[slot] = done.y + sum.y - blocks;
    }
    done.x += total.x, done.y += total.y;
  }
  if (threadIdx.x == 0) list.sequences[done.x] = {};

  const int least = max(1, kLeastKeys / list.block_keys), share = max(divide_up(done.y, list.ctas), least);
  bool in_pieces = false;
  if (!many && near && done.x > 0 && done.x * kv_heads <= list.ctas) {
    const int tile = blocks / kv_heads;
    for (int i = 0, piece = share; i < 3 && !in_pieces; ++i, piece += max(1, share / 8)) {
      const int pieces = tile * list.block_keys <= kWholeKeys ? tile > 0 : divide_up(tile, piece);
      int2 total;
      const int2 sum = scan({pieces, 0}, warp_sums, total);
      in_pieces = total.x * kv_heads <= list.ctas;
      if (in_pieces && tile > 0) work[slot] = pieces, near_before[slot] = (sum.x - pieces) * kv_heads;
    }
  }
  __syncthreads();

  const int* before = near ? near_before : list.before;  // blocks, or CTAs
  for (int cta = threadIdx.x; cta < list.ctas; cta += kThreads) {
    WorkStart start{.share = share};
    const int begin = in_pieces ? cta : cta * share;
    int low = 0, high = done.x - 1;  // the last sequence that begins at or before this CTA's first block
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (before[middle] <= begin)
        low = middle;
      else
        high = middle - 1;
    }
    const WorkSequence s = near ? near_sequences[low] : list.sequences[low];
    WorkPlace& place = start.place;
    place.sequence = low;
    start.sequence = s;
    int rest = begin - before[low];
    if (in_pieces) {
      const int pieces = work[low], tile = tile_blocks(s, args.shape, list, 0), piece = rest % pieces;
      place.head = rest / pieces;
      if (place.head < kv_heads) {
        place.block = tile_keys(s, args.shape, 0, list.rows).low / list.block_keys + piece * tile / pieces;
        start.blocks = (piece + 1) * tile / pieces - piece * tile / pieces;
        start.owner = cta - piece, start.pieces = pieces;
      }
    } else if (begin < done.y) {
      start.blocks = min(share, done.y - begin);
      const int head_blocks = ((low + 1 < done.x ? before[low + 1] : done.y) - before[low]) / kv_heads;
      place.head = rest / head_blocks;
      rest %= head_blocks;
      for (int count; rest >= (count = tile_blocks(s, args.shape, list, place.tile)); ++place.tile) rest -= count;
      place.block = tile_keys(s, args.shape, place.tile, list.rows).low / list.block_keys + rest;
    }
    list.starts[cta] = start;
  }
  // attention_mma reads the list before it waits: see there.
  __threadfence();
  __syncthreads();
  allow_next();
}

}  // namespace

void attention_plan(const Queue& queue, const DeviceStep& step, const PlanArgs& args) {
  launch(queue, attention_plan_kernel, 2, kThreads, 0, step, args);
}

}  // namespace maga::cuda
