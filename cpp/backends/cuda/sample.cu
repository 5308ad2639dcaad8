// The first of the sampler's kernels, and the call of both.
#include "backends/cuda/sample.cuh"

#include <algorithm>

namespace maga::cuda {
namespace {

struct Best {
  float logit = -INFINITY;
  int32_t id = 0;
  __device__ __forceinline__ void take(float other, int32_t other_id) {
    if (other > logit || (other == logit && other_id < id)) {
      logit = other;
      id = other_id;
    }
  }
};

__device__ __forceinline__ void warp_best(Best& best) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const float logit = __shfl_xor_sync(~0u, best.logit, offset);
    const int32_t id = __shfl_xor_sync(~0u, best.id, offset);
    best.take(logit, id);
  }
}

// Grid (chunks, draws). A thread has kScanElements / kScanThreads logits in registers at a time.
template <int N>
__global__ void __launch_bounds__(kScanThreads) scan_chunk(const SampleCall call) {
  allow_next();
  constexpr int kLoads = kScanElements / kScanThreads / N;
  __shared__ Best bests[kScanWarps];
  __shared__ float sums[kScanWarps];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  wait_for_previous();
  const Draw& draw = call.draws[blockIdx.y];
  if (draw.row < 0) return;
  const float* row = call.logits + int64_t{draw.row} * call.vocab;
  const int begin = blockIdx.x * call.chunk, end = min(call.vocab, begin + call.chunk);

  Best best;
  best.id = begin;
  bool finite = true;
  float x[kLoads][N];
  auto load = [&](int unit) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) load_logits<N>(row, unit + (i * kScanThreads + static_cast<int>(threadIdx.x)) * N, end, x[i]);
  };
  for (int unit = begin; unit < end; unit += kScanElements) {
    load(unit);
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
#pragma unroll
      for (int e = 0; e < N; ++e) {
        finite &= x[i][e] <= FLT_MAX;
        if (x[i][e] > best.logit) {
          best.logit = x[i][e];
          best.id = unit + (i * kScanThreads + static_cast<int>(threadIdx.x)) * N + e;
        }
      }
  }
  if (best.logit == -INFINITY) best.id = begin;
  warp_best(best);
  RowScan& scan = call.scans[blockIdx.y];
  if (lane == 0) {
    bests[warp] = best;
    scan.warp_max[blockIdx.x * kScanWarps + warp] = best.logit;
  }
  finite = __syncthreads_and(finite);
  best = bests[lane % kScanWarps];
  warp_best(best);

  float sum = 0;
  if (!is_greedy(draw) && !limits_k(draw, call.vocab) && finite && best.logit > -INFINITY) {
    const Scaler scaled(best.logit, draw.temperature);
    for (int unit = begin; unit < end; unit += kScanElements) {
      if (call.chunk > kScanElements) load(unit);  // else they are still here
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
#pragma unroll
        for (int e = 0; e < N; ++e) sum += expf(scaled(x[i][e]));
    }
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    sum = 0;
#pragma unroll
    for (int w = 0; w < kScanWarps; ++w) sum += sums[w];
  }
  if (threadIdx.x == 0) scan.chunks[blockIdx.x] = {best.logit, best.id, sum, finite};
}

}  // namespace

void sample_scan(const Queue& queue, const SampleCall& call) {
  const bool vectors = call.vocab % 4 == 0 && reinterpret_cast<uintptr_t>(call.logits) % 16 == 0;
  launch(queue, vectors ? scan_chunk<4> : scan_chunk<1>, dim3(call.chunks, call.count), dim3(kScanThreads), 0, call);
}

size_t sample_scratch_bytes(int count) { return count * sizeof(RowScan); }

void sample(const Queue& queue, const SampleArgs& args) {
  if (args.count == 0) return;
  const int a_chunk = (args.vocab + kMostChunks - 1) / kMostChunks;
  const int chunk = std::max(1, (a_chunk + kScanElements - 1) / kScanElements) * kScanElements;
  const SampleCall call{.logits = args.logits,
                        .vocab = args.vocab,
                        .count = args.count,
                        .chunk = chunk,
                        .chunks = (args.vocab + chunk - 1) / chunk,
                        .draws = args.draws,
                        .scans = static_cast<RowScan*>(args.scratch),
                        .chosen = args.chosen,
                        .result = args.result};
  sample_scan(queue, call);
  sample_draw(queue, call);
}

}  // namespace maga::cuda
