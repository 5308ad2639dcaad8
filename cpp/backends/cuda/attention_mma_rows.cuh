// What a warp of attention_mma does with a block of keys: scores, online softmax, sums of values.
#pragma once

#include "backends/cuda/attention_mma_codes.cuh"
#include "backends/cuda/attention_mma_shape.cuh"

namespace maga::cuda {

// What a warp knows of its 16 rows: a thread has rows lane / 4 and lane / 4 + 8, and of every 8 columns 2 * (lane % 4) and the
// next.
template <typename S>
struct MmaRows {
  using T = typename S::T;
  static constexpr int kKeys = S::kSlice / 8;
  uint32_t q[S::kHeadDim / 16][4];
  float out[S::kHeadDim / 8][4];
  float maximum[2], sum[2];  // of scores in units of log 2; the sum of this thread's columns only
  int limit[2], head[2];     // keys below the limit are seen; query heads
  MmaCodes<S> codes;

  __device__ void start(const MmaArgs& args, const MmaCursor<S>& at, int row_warp) {
    const int lane = threadIdx.x % 32, last = at.sequence.tokens * args.shape.group - 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int packed = min(at.place.tile * S::kRows + row_warp * 16 + lane / 4 + r * 8, last);
      const int token = packed / args.shape.group;
      head[r] = at.place.head * args.shape.group + packed % args.shape.group;
      limit[r] = at.sequence.kv_length - at.sequence.tokens + token + 1;
      maximum[r] = -INFINITY, sum[r] = 0;
      const T* row = static_cast<const T*>(args.q) + (at.sequence.first_token + token) * args.q_stride + head[r] * S::kHeadDim;
      if constexpr (S::kCodes) {
        codes.start(args, reinterpret_cast<const uint32_t*>(row), q, r);
      } else {
#pragma unroll
        for (int i = 0; i < S::kHeadDim / 8; ++i)
          q[i / 2][i % 2 * 2 + r] = *reinterpret_cast<const uint32_t*>(row + i * 8 + lane % 4 * 2);
      }
    }
#pragma unroll
    for (int i = 0; i < S::kHeadDim / 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) out[i][j] = 0;
  }

  // One slice of keys and values at `stage`, the first key being `first_key`.
  __device__ void step(const MmaArgs& args, const MmaCursor<S>& at, uint32_t stage, int first_key) {
    float score[kKeys][4] = {};
    if constexpr (S::kCodes) {
      codes.scores(args, stage, q, score);
    } else {
      products(stage, score);
      const float scale = args.scale * kLog2e;
#pragma unroll
      for (int j = 0; j < kKeys; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) score[j][c] *= scale;
    }
    edit(args, at, first_key, score);
    float shrink[2];
    soften(score, shrink);
    if constexpr (S::kCodes) codes.weigh(stage, first_key, at.sequence.kv_length, score, shrink);
    if (__any_sync(~0u, shrink[0] != 1.f || shrink[1] != 1.f)) rescale(shrink);
    if constexpr (S::kCodes)
      codes.add_values(stage, score, out);
    else
      add_values(stage, score);
  }

  __device__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < S::kHeadDim / 8; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) out[i][c] *= factor[c / 2];
  }

  // What `out` is to be multiplied with at the end.
  __device__ float unit() const {
    if constexpr (S::kCodes) return codes.values_unit();
    return 1;
  }
  // This thread's i-th pair of neighbouring columns of row r, and the first of them.
  __device__ static int column(int i) {
    const int lane = threadIdx.x % 32;
    return S::kCodes ? i / 2 * 16 + lane % 4 * 4 + i % 2 * 2 : i * 8 + lane % 4 * 2;
  }
  __device__ float2 pair(int i, int r) const {
    if constexpr (S::kCodes) return {out[i & ~1][2 * r + i % 2], out[i | 1][2 * r + i % 2]};
    return {out[i][2 * r], out[i][2 * r + 1]};
  }

 private:
  __device__ __forceinline__ void products(uint32_t stage, float (&score)[kKeys][4]) const {
    const int lane = threadIdx.x % 32;
    const uint32_t k = stage + ((lane & 7) + (lane >> 4) * 8) * S::kPitch + (lane >> 3 & 1) * 16;
#pragma unroll
    for (int i = 0; i < S::kHeadDim / 16; ++i) {
#pragma unroll
      for (int j = 0; j < S::kSlice / 16; ++j) {
        uint32_t b[4];
        load_matrices(b, k + j * 16 * S::kPitch + i * 32);
        Tensor<T>::mma(score[2 * j], q[i], b[0], b[1]);
        Tensor<T>::mma(score[2 * j + 1], q[i], b[2], b[3]);
      }
    }
  }

  // Soft cap, ALiBi, and what rows do not see.
  __device__ __forceinline__ void edit(const MmaArgs& args, const MmaCursor<S>& at, int first_key, float (&score)[kKeys][4]) const {
    const int key = first_key + threadIdx.x % 4 * 2;
    if (args.soft_cap > 0) {
      const float cap = args.soft_cap * kLog2e, inverse = 1 / cap;
#pragma unroll
      for (int j = 0; j < kKeys; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) score[j][c] = cap * tanh_fast(score[j][c] * inverse);
    }
    if (args.alibi_slopes != nullptr) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float slope = args.alibi_slopes[head[r]] * kLog2e;
#pragma unroll
        for (int j = 0; j < kKeys; ++j)
#pragma unroll
          for (int c = 0; c < 2; ++c) score[j][2 * r + c] += slope * (key + j * 8 + c - (limit[r] - 1));
      }
    }
    if (first_key + S::kSlice > at.keys.first_limit || (args.shape.window > 0 && first_key < at.keys.high - args.shape.window)) {
      const bool tree = args.tree_mask != nullptr && at.sequence.tokens <= kTreeTokens;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int low = args.shape.window > 0 ? limit[r] - args.shape.window : 0;
        const int high = tree ? at.sequence.kv_length : max(limit[r], at.sequence.context);
#pragma unroll
        for (int j = 0; j < kKeys; ++j)
#pragma unroll
          for (int c = 0; c < 2; ++c)
            if (key + j * 8 + c < low || key + j * 8 + c >= high) score[j][2 * r + c] = -INFINITY;
        if (tree) {
          const int before = at.sequence.kv_length - at.sequence.tokens;
          const uint64_t mask = args.tree_mask[at.sequence.first_token + limit[r] - 1 - before];
#pragma unroll
          for (int j = 0; j < kKeys; ++j)
#pragma unroll
            for (int c = 0; c < 2; ++c)
              if (const int i = key + j * 8 + c - before; i >= 0 && i < kTreeTokens && (mask >> i & 1) == 0)
                score[j][2 * r + c] = -INFINITY;
        }
      }
    }
  }

  // Scores to weights; what came before is to be multiplied with `shrink`.
  __device__ __forceinline__ void soften(float (&score)[kKeys][4], float (&shrink)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = maximum[r];
#pragma unroll
      for (int j = 0; j < kKeys; ++j) most = fmaxf(most, fmaxf(score[j][2 * r], score[j][2 * r + 1]));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      const float base = most == -INFINITY ? 0 : most;  // no key seen yet
      shrink[r] = exp2_fast(maximum[r] - base);
      maximum[r] = most;
      float more = 0;
#pragma unroll
      for (int j = 0; j < kKeys; ++j)
#pragma unroll
        for (int c = 2 * r; c < 2 * r + 2; ++c) more += score[j][c] = exp2_fast(score[j][c] - base);
      sum[r] = sum[r] * shrink[r] + more;
    }
  }

  __device__ __forceinline__ void add_values(uint32_t stage, const float (&weight)[kKeys][4]) {
    const int lane = threadIdx.x % 32;
    const uint32_t v = stage + S::kHalf + (lane & 15) * S::kPitch + (lane >> 4) * 16;
#pragma unroll
    for (int j = 0; j < S::kSlice / 16; ++j) {
      uint32_t p[4];
      Tensor<T>::pack_rows(p, weight[2 * j], weight[2 * j + 1]);
#pragma unroll
      for (int i = 0; i < S::kHeadDim / 16; ++i) {
        uint32_t b[4];
        load_matrices_transposed(b, v + j * 16 * S::kPitch + i * 32);
        Tensor<T>::mma(out[2 * i], p, b[0], b[1]);
        Tensor<T>::mma(out[2 * i + 1], p, b[2], b[3]);
      }
    }
  }
};

}  // namespace maga::cuda
