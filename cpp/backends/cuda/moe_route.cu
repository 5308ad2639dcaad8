// Routing of program/ops.h: a warp a row. Choices are compared as integers that order floats, NaN above all, so that every row
// gets experts that exist, and equals go by index.
#include "backends/cuda/launch.cuh"
#include "backends/cuda/moe.h"

namespace maga::cuda {
namespace {

constexpr int kWarps = 4;

struct RouteArgs {
  Routing routing;
  MoeTables tables;
  const float* logits;
  int64_t logits_stride;
  const float* correction;
  const int32_t* real_rows;
  int rows;
};

// 0 is below all of them: taken, or not there.
__device__ __forceinline__ uint32_t ordered(float x) {
  if (isnan(x)) return ~0u;
  const uint32_t bits = __float_as_uint(x + 0.f);  // -0 is 0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(uint32_t order) {
  return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}
__device__ __forceinline__ uint32_t most_of_warp(uint32_t x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(~0u, x);
#else
  for (int step = 16; step > 0; step /= 2) x = max(x, __shfl_xor_sync(~0u, x, step));
  return x;
#endif
}

struct Best {
  uint32_t order;
  int index;
};

// Of the warp's candidates i * 32 + lane that `takes` lets take part.
template <int kEach, typename Takes>
__device__ __forceinline__ Best best_of(const uint32_t (&order)[kEach], Takes&& takes) {
  const int lane = threadIdx.x % 32;
  uint32_t most = 0;
  int at = -1;
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (takes(i * 32 + lane) && order[i] > most) most = order[i], at = i * 32 + lane;
  const uint32_t best = most_of_warp(most);
  return {best, static_cast<int>(~most_of_warp(most == best && at >= 0 ? ~static_cast<uint32_t>(at) : 0))};
}

// element[index / 32] of lane index % 32
template <int kEach>
__device__ __forceinline__ float of_index(const float (&element)[kEach], int index) {
  float mine = element[0];
#pragma unroll
  for (int i = 1; i < kEach; ++i)
    if (index / 32 == i) mine = element[i];
  return __shfl_sync(~0u, mine, index % 32);
}

template <int kEach>
__device__ __forceinline__ void take(uint32_t (&order)[kEach], int index) {
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (index == static_cast<int>(i * 32 + threadIdx.x % 32)) order[i] = 0;
}

// Takes the experts of all groups but the best.
template <int kEach>
__device__ __forceinline__ void leave_groups(const Routing& r, uint32_t (&order)[kEach]) {
  const int lane = threadIdx.x % 32, groups = static_cast<int>(r.groups), size = static_cast<int>(r.experts) / groups;
  uint32_t sums[1] = {0};  // of group `lane`
  for (int g = 0; g < groups; ++g) {
    uint32_t left[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) left[i] = order[i];
    float sum = 0;
    for (int i = 0; i < r.group_best; ++i) {
      const Best best = best_of(left, [&](int e) { return e / size == g; });
      take(left, best.index);
      sum += value_of(best.order);
    }
    if (lane == g) sums[0] = ordered(sum);
  }
  uint32_t kept = 0;
  for (int i = 0; i < r.top_groups; ++i) {
    const int best = best_of(sums, [](int) { return true; }).index;
    take(sums, best);
    kept |= 1u << best;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (const int group = (i * 32 + lane) / size; group < groups && !(kept >> group & 1)) order[i] = 0;
}

// kEach: experts of a lane.
template <int kEach>
__global__ void __launch_bounds__(32 * kWarps) route(const RouteArgs a) {
  allow_next();
  wait_for_previous();
  const Routing& r = a.routing;
  const int row = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int experts = static_cast<int>(r.experts), top_k = static_cast<int>(r.top_k);
  if (row >= a.rows) return;
  const int64_t to = int64_t{row} * top_k + lane;
  if (a.real_rows && row >= *a.real_rows) {
    if (lane < top_k) a.tables.chosen[to] = -1;
    return;
  }
  float score[kEach];
  uint32_t order[kEach];
  float largest = -INFINITY;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int e = i * 32 + lane;
    score[i] = e < experts ? a.logits[row * a.logits_stride + e] : -INFINITY;
    order[i] = e < experts ? ordered(score[i]) : 0;
    largest = fmaxf(largest, score[i]);
  }
  if (r.score == ScoreKind::sigmoid) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) score[i] = 1 / (1 + expf(-score[i]));
  } else {
    largest = value_of(most_of_warp(ordered(largest)));
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) sum += score[i] = expf(score[i] - largest);
    sum = sum_of_warp(sum);
#pragma unroll
    for (int i = 0; i < kEach; ++i) score[i] /= sum;
  }
  if (a.correction) {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (const int e = i * 32 + lane; e < experts) order[i] = ordered(score[i] + a.correction[e]);
  }
  if (r.top_groups < r.groups) leave_groups(r, order);

  int chosen = 0;  // lane i: the i-th
  float weight = 0, sum = 0;
  for (int i = 0; i < top_k; ++i) {
    const int best = best_of(order, [](int) { return true; }).index;
    take(order, best);
    const float its = of_index(score, best);
    sum += its;
    if (lane == i) chosen = best, weight = its;
  }
  if (lane >= top_k) return;
  a.tables.chosen[to] = chosen;
  a.tables.weights[to] = (r.renormalise ? weight / sum : weight) * r.scale;
  atomicAdd(a.tables.counts + chosen, 1);
}

}  // namespace

void moe_route(const Queue& queue, const MoeArgs& args, const MoeTables& tables) {
  static_assert(kMostExperts <= 16 * 32 && kMostChosen <= 32 && kMostGroups <= 32);
  const int64_t experts = args.op->routing.experts;
  launch(queue,
         experts <= 32    ? route<1>
         : experts <= 64  ? route<2>
         : experts <= 128 ? route<4>
                          : route<16>,
         dim3((args.rows + kWarps - 1) / kWarps), dim3(32 * kWarps), 0,
         RouteArgs{.routing = args.op->routing,
                   .tables = tables,
                   .logits = args.logits,
                   .logits_stride = args.logits_stride,
                   .correction = args.correction,
                   .real_rows = args.real_rows,
                   .rows = args.rows});
}

}  // namespace maga::cuda
