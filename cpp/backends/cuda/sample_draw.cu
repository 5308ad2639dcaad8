// The second of the sampler's kernels: one CTA finishes one draw.
#include "backends/cuda/sample.cuh"
#include "core/rng.h"

namespace maga::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;
constexpr int kUnit = 512;       // logits that a warp reads at a time
constexpr int kBins = 2048;      // of a histogram, and the most units of a row
constexpr int kListed = 112;     // candidates that a warp can keep
constexpr int kLastBins = 1024;  // of the last level; above them it counts the elements of each bin
constexpr int kLastId = 0x7fffffff;

// exp(s) for s <= 0 in units of 2^-43, rounded down: the sum of 2^20 of them fits 64 bits. 0 below about -30.
__device__ __forceinline__ uint64_t weight_of(float s) {
  const uint32_t bits = __float_as_uint(expf(s));
  const int shift = 127 - static_cast<int>(bits >> 23);
  return shift > 43 ? 0 : (uint64_t{(bits & 0x7fffff) | 0x800000} << 20) >> shift;
}

// The distance from the best as an integer, in units of 2^-27; what is 32 or more away counts as equally far.
__device__ __forceinline__ uint32_t distance_of(float s) { return __float2uint_rz(fminf(-s * 134217728.f, 4294967040.f)); }

struct Candidate {
  float s;
  int32_t id;
};

struct Shared {
  uint32_t low[kBins], high[kBins];  // 64-bit sums, of a histogram's bins or of units
  uint64_t warp_sums[kWarps];
  uint64_t before;  // what a search found: the place, and the sum of those before it
  uint32_t place;
  Candidate list[kWarps][kListed];  // in the order of their ids
  int32_t listed[kWarps];
};

__device__ __forceinline__ uint64_t warp_sum(uint64_t x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

__device__ __forceinline__ uint64_t warp_scan(uint64_t x, int lane) {  // inclusive
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const uint64_t other = __shfl_up_sync(~0u, x, offset);
    if (lane >= offset) x += other;
  }
  return x;
}

// Which tokens are left: those nearer than `distance`, and at that distance those up to `last_id`.
struct Kept {
  uint32_t distance = ~0u;
  int32_t last_id = kLastId;
  float lowest = -INFINITY;  // min_p
  __device__ __forceinline__ bool operator()(float s, int32_t id) const {
    if (s < lowest) return false;
    if (distance == ~0u) return true;  // the same for all threads
    const uint32_t d = distance_of(s);
    return d < distance || (d == distance && id <= last_id);
  }
};

// A draw at work. Every thread of the CTA calls every method.
template <int N>
struct Drawing {
  Shared& shared;
  const float* row;
  int vocab;
  Scaler scaled;
  Kept kept;
  bool in_list = false;
  int first_unit = 0, last_unit;  // of the row: what is looked at
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;

  __device__ Drawing(Shared& shared, const float* row, int vocab, const Scaler& scaled)
      : shared(shared), row(row), vocab(vocab), scaled(scaled), last_unit((vocab + kUnit - 1) / kUnit) {}

  // f(unit) for the row's units of this warp, which are neighbours, so that the lists of the warps are in the order of ids.
  template <typename F>
  __device__ __forceinline__ void each_unit(F&& f) const {
    const int a_warp = (last_unit - first_unit + kWarps - 1) / kWarps;
    const int first = first_unit + warp * a_warp, last = min(last_unit, first + a_warp);
    for (int unit = first; unit < last; ++unit) f(unit);
  }

  // f(s, id) for this lane's elements of a unit of the row. Past its end there is nothing that weighs anything.
  template <typename F>
  __device__ __forceinline__ void in_unit(int unit, F&& f) const {
    constexpr int kAhead = N == 1 ? 8 : kUnit / (kWarp * N);  // loads under way
    float x[kAhead][N];
    const int end = (unit + 1) * kUnit;
#pragma unroll 1
    for (int first = unit * kUnit + lane * N; first < end; first += kAhead * kWarp * N) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) load_logits<N>(row, first + i * kWarp * N, vocab, x[i]);
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
#pragma unroll
        for (int e = 0; e < N; ++e) f(scaled(x[i][e]), first + i * kWarp * N + e);
    }
  }

  // f(s, id) for all elements of this lane, and done(unit) after each unit.
  template <typename F, typename Done>
  __device__ __forceinline__ void each(F&& f, Done&& done) const {
    if (in_list) {
      for (int i = lane; i < shared.listed[warp]; i += kWarp) f(shared.list[warp][i].s, shared.list[warp][i].id);
      done(warp);
    } else {
      each_unit([&](int unit) {
        in_unit(unit, f);
        done(unit);
      });
    }
  }

  __device__ __forceinline__ void add(uint32_t bin, uint64_t amount) const {
    if (amount == 0) return;
    const uint32_t low = static_cast<uint32_t>(amount);
    const uint32_t old = atomicAdd(&shared.low[bin], low);
    const uint32_t high = static_cast<uint32_t>(amount >> 32) + (old + low < old);
    if (high) atomicAdd(&shared.high[bin], high);
  }

  __device__ void clear() const {
    __syncthreads();
    for (int i = threadIdx.x; i < kBins; i += kThreads) shared.low[i] = shared.high[i] = 0;
    __syncthreads();
  }

  // Finds the first of the 64-bit sums at which their running total reaches target(total): `place`, with `before` what precedes it.
  template <typename Target>
  __device__ uint64_t search(int bins, Target&& target_of) const {
    __syncthreads();
    const int bin = threadIdx.x * 2;
    const uint64_t a = bin < bins ? uint64_t{shared.high[bin]} << 32 | shared.low[bin] : 0;
    const uint64_t b = bin < bins ? uint64_t{shared.high[bin + 1]} << 32 | shared.low[bin + 1] : 0;
    const uint64_t scan = warp_scan(a + b, lane);
    if (lane == kWarp - 1) shared.warp_sums[warp] = scan;
    __syncthreads();
    const uint64_t warps = warp_scan(shared.warp_sums[lane], lane);
    const uint64_t total = __shfl_sync(~0u, warps, kWarps - 1);
    const uint64_t through = scan + (warp == 0 ? 0 : __shfl_sync(~0u, warps, max(0, warp - 1)));
    const uint64_t before = through - a - b, target = target_of(total);
    if (before < target && target <= through) {
      const bool second = before + a < target;
      shared.place = bin + second;
      shared.before = before + (second ? a : 0);
    }
    __syncthreads();
    return target;
  }

  // Keeps the nearest tokens whose amounts reach the target, of those still kept; among the last ones, which are equally far,
  // those of the lowest ids. amount(s): 1 or the weight.
  template <typename Amount, typename Target>
  __device__ void keep_nearest(Amount&& amount, Target&& target_of) {
    uint32_t prefix = 0;
    uint64_t target = 0;
    for (int level = 0; level < 3; ++level) {  // 11, 11 and 10 bits of the distance
      const int shift = level == 0 ? 21 : level == 1 ? 10 : 0;
      const uint32_t mask = level == 2 ? kLastBins - 1 : kBins - 1;
      clear();
      each(
          [&](float s, int32_t id) {
            const uint32_t distance = distance_of(s);
            if (level > 0 && distance >> (level == 1 ? 21 : 10) != prefix) return;
            if (!kept(s, id)) return;
            add(distance >> shift & mask, amount(s));
            if (level == 2) atomicAdd(&shared.low[kLastBins + (distance & mask)], 1);
          },
          [](int) {});
      const uint64_t reached =
          search(level == 2 ? kLastBins : kBins, [&](uint64_t total) { return level == 0 ? target_of(total) : target; });
      target = reached - shared.before;
      prefix = level == 0 ? shared.place : prefix << (level == 1 ? 11 : 10) | shared.place;
    }
    const bool one = shared.low[kLastBins + shared.place] == 1;
    const Kept earlier = kept;
    kept.distance = prefix;
    if (one) {
      if (prefix < earlier.distance) kept.last_id = kLastId;
      return;
    }
    kept.last_id = place_of([&](float s, int32_t id) { return distance_of(s) == prefix && earlier(s, id) ? amount(s) : 0; },
                            [&](uint64_t) { return target; });
  }

  // The id at which the running total of amount(s, id), in the order of ids, reaches target(total).
  template <typename Amount, typename Target>
  __device__ int32_t place_of(Amount&& amount, Target&& target_of) const {
    clear();
    uint64_t sum = 0;
    each([&](float s, int32_t id) { sum += amount(s, id); },
         [&](int unit) {
           sum = warp_sum(sum);
           if (lane == 0) {
             shared.low[unit] = static_cast<uint32_t>(sum);
             shared.high[unit] = static_cast<uint32_t>(sum >> 32);
           }
           sum = 0;
         });
    uint64_t left = search(kBins, target_of) - shared.before;
    const int unit = shared.place;
    int32_t found = -1;
    // Every warp walks through the unit, so that all know the place.
    auto step = [&](uint64_t mine, auto&& id_at) {
      if (found >= 0) return;
      const uint64_t through = warp_scan(mine, lane);
      const unsigned reached = __ballot_sync(~0u, through >= left);
      if (reached == 0) {
        left -= __shfl_sync(~0u, through, kWarp - 1);
      } else {
        const int first = __ffs(reached) - 1;
        found = __shfl_sync(~0u, id_at(left - (through - mine)), first);
      }
    };
    if (in_list) {
      const int count = shared.listed[unit];
      for (int i = 0; i < count; i += kWarp) {
        const Candidate c = i + lane < count ? shared.list[unit][i + lane] : Candidate{-INFINITY, -1};
        step(c.id >= 0 ? amount(c.s, c.id) : 0, [&](uint64_t) { return c.id; });
      }
      return found;
    }
    for (int first = unit * kUnit; first < (unit + 1) * kUnit; first += kWarp * N) {
      float x[N];
      load_logits<N>(row, first + lane * N, vocab, x);
      uint64_t amounts[N], mine = 0;
#pragma unroll
      for (int e = 0; e < N; ++e) {
        const int id = first + lane * N + e;
        mine += amounts[e] = amount(scaled(x[e]), id);
      }
      step(mine, [&](uint64_t within) {  // which of this lane's N
        int e = 0;
        uint64_t running = amounts[0];
#pragma unroll
        for (int i = 1; i < N; ++i)
          if (running < within) {
            running += amounts[i];
            e = i;
          }
        return first + lane * N + e;
      });
    }
    return found;
  }

  // Lists the tokens with s >= bar (not those at -infinity), if there is room for them.
  __device__ void list_from(float bar) {
    bar = fmaxf(bar, -FLT_MAX);
    int count = 0;
    constexpr int kSteps = kUnit / (kWarp * N);
    each_unit([&](int unit) {
      float x[kSteps][N];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) load_logits<N>(row, unit * kUnit + (i * kWarp + lane) * N, vocab, x[i]);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        int mine = 0;
#pragma unroll
        for (int e = 0; e < N; ++e) {
          x[i][e] = scaled(x[i][e]);
          mine += x[i][e] >= bar;
        }
        if (!__any_sync(~0u, mine)) continue;
        int at = mine;  // where this lane's go
#pragma unroll
        for (int offset = 1; offset < kWarp; offset *= 2) {
          const int other = __shfl_up_sync(~0u, at, offset);
          if (lane >= offset) at += other;
        }
        const int all = __shfl_sync(~0u, at, kWarp - 1);
        at += count - mine;
#pragma unroll
        for (int e = 0; e < N; ++e)
          if (x[i][e] >= bar) {
            if (at < kListed) shared.list[warp][at] = {x[i][e], unit * kUnit + (i * kWarp + lane) * N + e};
            ++at;
          }
        count += all;
      }
    });
    if (lane == 0) shared.listed[warp] = count;
    in_list = !__syncthreads_or(count > kListed);
  }
};

// The k-th largest of what the scan's warps found: at least k tokens are as good.
__device__ float best_bound(const RowScan& scan, int count, int k, float* largest) {
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const float mine = scan.warp_max[i];
    int better = 0;
    for (int j = 0; j < count; ++j) {
      const float other = scan.warp_max[j];
      better += other > mine || (other == mine && j < i);
    }
    if (better == k - 1) *largest = mine;
  }
  __syncthreads();
  return *largest;
}

// The part p of a weight in units of 1, in those of weight_of(), at least one.
__device__ __forceinline__ uint64_t share_of(double weight, double p) {
  return max(uint64_t{1}, static_cast<uint64_t>(ceil(p * weight * 0x1p43)));
}

template <int N>
__global__ void __launch_bounds__(kThreads) finish_draw(const SampleCall call) {
  allow_next();
  __shared__ Shared shared;
  __shared__ float bound;
  wait_for_previous();
  const Draw draw = call.draws[blockIdx.x];
  const RowScan& scan = call.scans[blockIdx.x];
  auto finish = [&](int32_t token, int32_t finite) {
    if (threadIdx.x != 0) return;
    call.chosen[blockIdx.x] = token;
    call.result[blockIdx.x] = {token, finite};
  };
  if (draw.row < 0) return finish(0, 1);

  // Every warp combines the chunks, two a lane.
  const int lane = threadIdx.x % kWarp;
  float max = -INFINITY;
  int32_t argmax = 0;
  bool finite = true;
  for (int i = lane; i < call.chunks; i += kWarp) {
    const ChunkScan chunk = scan.chunks[i];
    finite &= chunk.finite;
    if (chunk.max > max) {
      max = chunk.max;
      argmax = chunk.argmax;
    }
  }
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const float other = __shfl_xor_sync(~0u, max, offset);
    const int32_t id = __shfl_xor_sync(~0u, argmax, offset);
    if (other > max || (other == max && id < argmax)) {
      max = other;
      argmax = id;
    }
  }
  finite = __all_sync(~0u, finite) && max > -INFINITY;
  if (!finite) return finish(0, 0);
  if (is_greedy(draw)) return finish(argmax, 1);

  const Scaler scaled(max, draw.temperature);
  Drawing<N> drawing(shared, call.logits + int64_t{draw.row} * call.vocab, call.vocab, scaled);
  auto weight = [](float s) { return weight_of(s); };
  // u in [0, 1), in units of 2^-64.
  uint64_t number = static_cast<uint64_t>(uniform(draw.seed, draw.stream, draw.index) * 0x1p53) << 11;
  if (limits_k(draw, call.vocab)) {
    const int warps = call.chunks * kScanWarps;
    if (draw.top_k <= warps) drawing.list_from(scaled(best_bound(scan, warps, draw.top_k, &bound)));
    drawing.keep_nearest([](float) { return uint64_t{1}; },
                         [&](uint64_t total) { return min(total, static_cast<uint64_t>(draw.top_k)); });
    if (draw.top_p < 1)
      drawing.keep_nearest(weight,
                           [&](uint64_t all) { return min(all, share_of(static_cast<double>(all) * 0x1p-43, draw.top_p)); });
  } else {
    // The weight of each chunk, two a lane, and of the row: every warp computes the same.
    double weights[kMostChunks / kWarp], sum = 0;
#pragma unroll
    for (int i = 0; i < kMostChunks / kWarp; ++i) {
      const int chunk = lane * (kMostChunks / kWarp) + i;
      weights[i] = chunk < call.chunks ? double{scan.chunks[chunk].sum} * expf(scaled(scan.chunks[chunk].max)) : 0;
      sum += weights[i];
    }
    double through = sum;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const double other = __shfl_up_sync(~0u, through, offset);
      if (lane >= offset) through += other;
    }
    const double total = __shfl_sync(~0u, through, kWarp - 1);
    if (draw.top_p < 1) {
      // All tokens below probability (1 - p) / vocab together have less than 1 - p, so none of them is needed to reach p; the
      // margin is for rounding. No token weighs more than 1, so that at least p * total tokens are needed.
      const float bar = logf((1 - draw.top_p) / static_cast<float>(call.vocab) * static_cast<float>(total)) - 1e-3f;
      if (draw.top_p * total < kWarps * kListed) drawing.list_from(bar);
      drawing.kept.lowest = bar;
      drawing.keep_nearest(weight, [&](uint64_t there) { return min(there, share_of(total, draw.top_p)); });
    } else if (draw.min_p > 0) {
      drawing.list_from(logf(draw.min_p));
    } else {
      // The whole row: which chunk, and then where in it.
      const double target = number * 0x1p-64 * total;
      double before = through - sum;
      int chunk = -1;
      double share = 0;
#pragma unroll
      for (int i = 0; i < kMostChunks / kWarp; ++i) {
        if (chunk < 0 && weights[i] > 0 && target < before + weights[i]) {
          chunk = lane * (kMostChunks / kWarp) + i;
          share = fmax(0., (target - before) / weights[i]);
        }
        before += weights[i];
      }
      const unsigned found = __ballot_sync(~0u, chunk >= 0);
      const int source = found ? __ffs(found) - 1 : 0;
      chunk = found ? __shfl_sync(~0u, chunk, source) : argmax / call.chunk;  // if rounding left none
      share = __shfl_sync(~0u, share, source);
      number = static_cast<uint64_t>(fmin(share, 1 - 0x1p-53) * 0x1p53) << 11;
      drawing.first_unit = chunk * (call.chunk / kUnit);
      drawing.last_unit = min(drawing.last_unit, drawing.first_unit + call.chunk / kUnit);
    }
  }
  if (draw.min_p > 0) drawing.kept.lowest = fmaxf(drawing.kept.lowest, fminf(0.f, logf(draw.min_p)));

  const Kept kept = drawing.kept;
  finish(drawing.place_of([&](float s, int32_t id) { return kept(s, id) ? weight_of(s) : uint64_t{0}; },
                          [&](uint64_t all) { return __umul64hi(number, all) + 1; }),
         1);
}

}  // namespace

void sample_draw(const Queue& queue, const SampleCall& call) {
  MAGA_CHECK(call.vocab <= kBins * kUnit, "a vocabulary of ", call.vocab);
  const bool vectors = call.vocab % 4 == 0 && reinterpret_cast<uintptr_t>(call.logits) % 16 == 0;
  auto* kernel = vectors ? finish_draw<4> : finish_draw<1>;
  launch(queue, kernel, dim3(call.count), dim3(kThreads), 0, call);
}

}  // namespace maga::cuda
