// What the two kernels of the sampler share.
//
// sample_scan reads every row once, in chunks: the largest logit, its first place, whether all is finite. sample_draw finishes a
// draw in one CTA. Weights exp(logit - max) are integers there, so that sums do not depend on their order, and equal arguments
// give equal tokens in any batch.
#pragma once

#include <cfloat>
#include <cstdint>

#include "backends/cuda/launch.cuh"
#include "backends/cuda/sample.h"

namespace maga::cuda {

constexpr int kWarp = 32;
constexpr int kScanThreads = 256;
constexpr int kScanWarps = kScanThreads / kWarp;
constexpr int kScanElements = 4096;  // of a chunk's unit; chunks of larger vocabularies are several
constexpr int kMostChunks = 64;

// Of one chunk of one draw's row.
struct ChunkScan {
  float max;       // -infinity when every logit is
  int32_t argmax;  // first place of `max`
  float sum;       // of exp((logit - max) / temperature), where a draw needs it
  int32_t finite;  // no NaN, no +infinity
};

// One draw's part of the scratch memory.
struct RowScan {
  ChunkScan chunks[kMostChunks];
  float warp_max[kMostChunks * kScanWarps];  // of what each warp of each chunk read
};

struct SampleCall {
  const float* logits;
  int vocab, count;
  int chunk;   // logits a chunk
  int chunks;  // a row
  const Draw* draws;
  RowScan* scans;
  int32_t* chosen;
  Drawn* result;
};

__device__ __forceinline__ bool is_greedy(const Draw& d) { return d.temperature == 0 || d.top_k == 1 || d.top_p <= 0; }
__device__ __forceinline__ bool limits_k(const Draw& d, int vocab) { return d.top_k > 0 && d.top_k < vocab; }

// (logit - max) / temperature, as decode/sampler.cpp computes it. A scale beyond fp32 leaves the best at 0 and the rest at
// -infinity; then the product is taken with the largest fp32 number, which gives the same but for logits within 1e-37 of the best.
struct Scaler {
  float max, scale;
  __device__ __forceinline__ Scaler(float max, float temperature) : max(max), scale(fminf(1.f / temperature, FLT_MAX)) {}
  __device__ __forceinline__ float operator()(float logit) const { return (logit - max) * scale; }
};

// N floats from `from`; -infinity past `end`.
template <int N>
__device__ __forceinline__ void load_logits(const float* row, int from, int end, float (&x)[N]) {
  if constexpr (N == 4) {  // rows of multiples of 4
    const float4 v =
        from < end ? *reinterpret_cast<const float4*>(row + from) : make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
  } else {
    x[0] = from < end ? row[from] : -INFINITY;
  }
}

void sample_scan(const Queue& queue, const SampleCall& call);
void sample_draw(const Queue& queue, const SampleCall& call);

}  // namespace maga::cuda
