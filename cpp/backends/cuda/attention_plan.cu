// The plan of a step: which sequences are in which work list, the blocks before each, and where every CTA begins.
#include "backends/cuda/attention_plan.h"
#include "backends/cuda/launch.cuh"

namespace maga::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kLeastKeys = 128;  // of a CTA: below, merging costs more than it saves

__device__ int tile_blocks(const WorkSequence& s, const WorkShape& shape, const WorkList& list, int tile) {
  const TileKeys keys = tile_keys(s, shape, tile, list.rows);
  return divide_up(keys.high, list.block_keys) - keys.low / list.block_keys;
}

// Inclusive sums of two counts over the CTA.
__device__ int2 scan(int2 value, int2* warp_sums) {
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
  __syncthreads();
  return value;
}

// One CTA a list. (grid 2)
__global__ void __launch_bounds__(kThreads) attention_plan_kernel(DeviceStep step, PlanArgs args) {
  __shared__ int2 warp_sums[32];
  __shared__ int work[kThreads];
  allow_next();
  wait_for_previous();
  const bool many = blockIdx.x == 1;
  const WorkList list = many ? args.many : args.few;
  if (list.ctas == 0) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  int2 done = {0, 0};  // sequences in the list, blocks
  for (int base = 0; base < args.sequences; base += kThreads) {
    // A warp adds up the tiles of one sequence.
    for (int i = warp; i < min(kThreads, args.sequences - base); i += kThreads / 32) {
      const int first = step.sequence_start[base + i], tokens = step.sequence_start[base + i + 1] - first;
      const WorkSequence s{first, tokens, step.kv_length[base + i], 0, step.context ? step.context[base + i] : 0};
      int blocks = 0;
      if (tokens > 0 && (args.few.ctas == 0 || (tokens * args.shape.group > args.few.rows) == many)) {
        for (int tile = lane; tile < tiles_of(s, args.shape.group, list.rows); tile += 32)
          blocks += tile_blocks(s, args.shape, list, tile);
      }
      for (int offset = 16; offset > 0; offset /= 2) blocks += __shfl_xor_sync(~0u, blocks, offset);
      if (lane == 0) work[i] = blocks * args.shape.kv_heads;
    }
    __syncthreads();
    const int i = base + threadIdx.x;
    const int blocks = i < args.sequences ? work[threadIdx.x] : 0;
    const int2 sum = scan({blocks > 0, blocks}, warp_sums);
    if (blocks > 0) {
      const int slot = done.x + sum.x - 1, first = step.sequence_start[i];
      list.sequences[slot] = {first, step.sequence_start[i + 1] - first, step.kv_length[i], step.page_start[i],
                              step.context ? step.context[i] : 0};
      list.before[slot] = done.y + sum.y - blocks;
    }
    if (threadIdx.x == kThreads - 1) warp_sums[0] = sum;
    __syncthreads();
    done.x += warp_sums[0].x, done.y += warp_sums[0].y;
    __syncthreads();
  }

  int share = max(divide_up(done.y, list.ctas), max(1, kLeastKeys / list.block_keys));
  const int tile = divide_up(done.y, max(1, done.x * args.shape.kv_heads));  // blocks, where a sequence has one tile a head
  if (!many && tile <= 2 * share) share = max(share, tile);                  // in two it would be merged for little
  for (int cta = threadIdx.x; cta < list.ctas; cta += kThreads) {
    WorkStart start{.blocks = max(0, min(share, done.y - cta * share)), .share = share};
    if (start.blocks == 0) {
      list.starts[cta] = start;
      continue;
    }
    int low = 0, high = done.x - 1;  // the last sequence whose blocks begin at or before this CTA's
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (list.before[middle] <= cta * share)
        low = middle;
      else
        high = middle - 1;
    }
    const WorkSequence s = list.sequences[low];
    const int blocks = (low + 1 < done.x ? list.before[low + 1] : done.y) - list.before[low];
    const int head_blocks = blocks / args.shape.kv_heads;
    int rest = cta * share - list.before[low];
    WorkPlace& place = start.place;
    place.sequence = low, place.head = rest / head_blocks;
    rest %= head_blocks;
    for (int count; rest >= (count = tile_blocks(s, args.shape, list, place.tile)); ++place.tile) rest -= count;
    place.block = tile_keys(s, args.shape, place.tile, list.rows).low / list.block_keys + rest;
    start.sequence = s;
    list.starts[cta] = start;
  }
}

}  // namespace

void attention_plan(const Queue& queue, const DeviceStep& step, const PlanArgs& args) {
  launch(queue, attention_plan_kernel, 2, kThreads, 0, step, args);
}

}  // namespace maga::cuda
