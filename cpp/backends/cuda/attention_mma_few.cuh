// attention_mma for few packed rows, as in decode. Keys stand on mma's 16-row side and packed rows on its 8-column side: a tile of
// 8 rows costs half the instructions and registers that one of 16 does, so an SM has room for more of them.
//
// A thread has, with g = lane / 4 and t = lane % 4: of scores the keys g and g + 8 of every 16, and of every 8 rows 2 t and 2 t +
// 1; of results the same rows, and of every 16 columns two, see column(). Of q it has row g. Codes: see attention_mma_codes.cuh.
#pragma once

#include "backends/cuda/attention_mma_shape.cuh"

namespace maga::cuda {

template <typename S>
struct MmaFew {
  using T = typename S::T;
  static constexpr int kTiles = S::kRows / 8, kKeyTiles = S::kSlice / 16, kSteps = S::kHeadDim / 16;
  static_assert(!S::kCodes || S::kSlice % 32 == 0);
  uint32_t q[kSteps][kTiles][2];
  float out[kSteps][kTiles][4];
  float maximum[kTiles][2], sum[kTiles][2];  // of scores in units of log 2; the sum of this thread's keys only
  int limit[kTiles][2], head[kTiles][2];     // keys below the limit are seen; query heads
  float q_unit[kTiles][2];                   // of codes: q is in these units, so that fp16 holds it
  float v_unit;                              // and values in this one: a power of two that no scale of a value has exceeded

  __device__ void start(const MmaArgs& args, const MmaCursor<S>& at, int) {
    const int lane = threadIdx.x % 32, last = at.sequence.tokens * args.shape.group - 1;
    v_unit = 0x1p-110f;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int first = at.place.tile * S::kRows + n * 8;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int packed = min(first + lane % 4 * 2 + c, last), token = packed / args.shape.group;
        head[n][c] = at.place.head * args.shape.group + packed % args.shape.group;
        limit[n][c] = at.sequence.kv_length - at.sequence.tokens + token + 1;
        maximum[n][c] = -INFINITY, sum[n][c] = 0;
      }
      const int packed = min(first + lane / 4, last), token = packed / args.shape.group;
      const int own_head = at.place.head * args.shape.group + packed % args.shape.group;
      const auto* const row = reinterpret_cast<const uint32_t*>(
          static_cast<const T*>(args.q) + (at.sequence.first_token + token) * args.q_stride + own_head * S::kHeadDim);
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) q[i][n][h] = row[i * 8 + (S::kCodes ? lane % 4 * 2 + h : h * 4 + lane % 4)];
      if constexpr (S::kCodes) to_units(args, n);
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) out[i][n][c] = 0;
  }

  // One slice of keys and values at `stage`, the first key being `first_key`.
  __device__ void step(const MmaArgs& args, const MmaCursor<S>& at, uint32_t stage, int first_key) {
    float score[kKeyTiles][kTiles][4] = {};
    if constexpr (S::kCodes)
      code_products(args, stage, score);
    else
      products(args, stage, score);
    edit(args, at, first_key, score);
    float shrink[kTiles][2];
    soften(score, shrink);
    if constexpr (S::kCodes) weigh(stage, first_key, at.sequence.kv_length, score, shrink);
    bool same = true;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) same = same && shrink[n][0] == 1.f && shrink[n][1] == 1.f;
    if (__any_sync(~0u, !same)) rescale(shrink);
    add_values(stage, score);
  }

  __device__ void rescale(const float (&factor)[kTiles][2]) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) out[i][n][c] *= factor[n][c % 2];
  }

  // What `out` is to be multiplied with at the end.
  __device__ float unit() const {
    if constexpr (S::kCodes) return v_unit * code_unit<S::E::kType>();
    return 1;
  }
  // That out[i][n][2 h + c] is of.
  __device__ static int row(int n, int c) { return n * 8 + threadIdx.x % 4 * 2 + c; }
  __device__ static int column(int i, int h) {
    const int g = threadIdx.x % 32 / 4;
    return i * 16 + (S::kCodes ? 2 * g + h : g + 8 * h);
  }

 private:
  // q as fp16 numbers and units.
  __device__ __forceinline__ void to_units(const MmaArgs& args, int n) {
    float unit = 1;
    if (args.bf16) {
      uint32_t most = 0;
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) most = max(most, max(q[i][n][h] << 16 & 0x7fff0000u, q[i][n][h] & 0x7fff0000u));
      most = max(most, __shfl_xor_sync(~0u, most, 1));
      most = max(most, __shfl_xor_sync(~0u, most, 2));
      const uint32_t bits = q_unit_bits(most);
      const float inverse = __uint_as_float(0x7f000000u - bits);
      unit = __uint_as_float(bits);
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          uint32_t& pair = q[i][n][h];
          pair = Tensor<__half>::pack(__uint_as_float(pair << 16) * inverse, __uint_as_float(pair & 0xffff0000u) * inverse);
        }
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) q_unit[n][c] = __shfl_sync(~0u, unit, (threadIdx.x % 4 * 2 + c) * 4);
  }

  __device__ __forceinline__ void products(const MmaArgs& args, uint32_t stage, float (&score)[kKeyTiles][kTiles][4]) const {
    const int lane = threadIdx.x % 32;
    // Sums of products wait for each other: two of them where there would be one.
    constexpr int kSums = kKeyTiles * kTiles == 1 ? 2 : 1;
    float sums[kSums][kKeyTiles][kTiles][4] = {};
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
      const uint32_t keys = stage + S::place(j * 16 + (lane & 15), lane >> 4);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        uint32_t a[4];
        load_matrices(a, S::after(keys, 2 * i));
#pragma unroll
        for (int n = 0; n < kTiles; ++n) Tensor<T>::mma(sums[i % kSums][j][n], a, q[i][n][0], q[i][n][1]);
      }
    }
    const float scale = args.scale * kLog2e;
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          float all = sums[0][j][n][c];
          if constexpr (kSums == 2) all += sums[1][j][n][c];
          score[j][n][c] = all * scale;
        }
  }

  __device__ __forceinline__ void code_products(const MmaArgs& args, uint32_t stage, float (&score)[kKeyTiles][kTiles][4]) const {
    constexpr DType kType = code_type<typename S::E>;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < kKeyTiles; j += 2) {
      const uint32_t keys = stage + S::place(j * 16 + lane, 0);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        uint32_t k[4];
        load_matrices(k, S::after(keys, i));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t a[4] = {code_pair<kType, 0, 1>(k[2 * h]), code_pair<kType, 0, 1>(k[2 * h + 1]),
                                 code_pair<kType, 2, 3>(k[2 * h]), code_pair<kType, 2, 3>(k[2 * h + 1])};
#pragma unroll
          for (int n = 0; n < kTiles; ++n) Tensor<__half>::mma(score[j + h][n], a, q[i][n][0], q[i][n][1]);
        }
      }
    }
    const float scale = args.scale * kLog2e * code_unit<kType>();
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float key_scale = scale * scale_at(stage + 2 * S::kHalf, j, h);
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c) score[j][n][2 * h + c] *= q_unit[n][c] * key_scale;
      }
  }

  // Of this thread's key g + 8 h of the j-th 16.
  __device__ __forceinline__ static float scale_at(uint32_t scales, int j, int h) {
    return scale_to_float(load_shared_half(scales + (j * 16 + threadIdx.x % 32 / 4 + 8 * h) * 2));
  }

  // Soft cap, ALiBi, and what rows do not see.
  __device__ __forceinline__ void edit(const MmaArgs& args, const MmaCursor<S>& at, int first_key,
                                       float (&score)[kKeyTiles][kTiles][4]) const {
    const int key = first_key + threadIdx.x % 32 / 4;
    // `change` of (a score, its key, tile and row of the tile)
    const auto each = [&](auto&& change) {
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int c = 0; c < 4; ++c) change(score[j][n][c], key + j * 16 + c / 2 * 8, n, c % 2);
    };
    if (args.soft_cap > 0) {
      const float cap = args.soft_cap * kLog2e, inverse = 1 / cap;
      each([&](float& x, int, int, int) { x = cap * tanh_fast(x * inverse); });
    }
    if (args.alibi_slopes != nullptr) {
      float slope[kTiles][2];
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) slope[n][c] = args.alibi_slopes[head[n][c]] * kLog2e;
      each([&](float& x, int at_key, int n, int c) { x += slope[n][c] * (at_key - (limit[n][c] - 1)); });
    }
    if (first_key + S::kSlice > at.keys.first_limit || (args.shape.window > 0 && first_key < at.keys.high - args.shape.window)) {
      const bool tree = args.tree_mask != nullptr && at.sequence.tokens <= kTreeTokens;
      const int before = at.sequence.kv_length - at.sequence.tokens;
      uint64_t mask[kTiles][2];
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          mask[n][c] = tree ? args.tree_mask[at.sequence.first_token + limit[n][c] - 1 - before] : ~uint64_t{0};
      each([&](float& x, int at_key, int n, int c) {
        const int low = args.shape.window > 0 ? limit[n][c] - args.shape.window : 0;
        const int high = tree ? at.sequence.kv_length : max(limit[n][c], at.sequence.context), i = at_key - before;
        if (at_key < low || at_key >= high || (i >= 0 && i < kTreeTokens && (mask[n][c] >> i & 1) == 0)) x = -INFINITY;
      });
    }
  }

  // Of all lanes that have the same rows.
  __device__ __forceinline__ static float most_of(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
  }

  // Scores to weights; what came before is to be multiplied with `shrink`.
  __device__ __forceinline__ void soften(float (&score)[kKeyTiles][kTiles][4], float (&shrink)[kTiles][2]) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float most = maximum[n][c];
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) most = fmaxf(most, fmaxf(score[j][n][c], score[j][n][2 + c]));
        most = most_of(most);
        const float base = most == -INFINITY ? 0 : most;  // no key seen yet
        shrink[n][c] = exp2_fast(maximum[n][c] - base);
        maximum[n][c] = most;
        float more = 0;
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
          for (int h = 0; h < 2; ++h) more += score[j][n][2 * h + c] = exp2_fast(score[j][n][2 * h + c] - base);
        sum[n][c] = sum[n][c] * shrink[n][c] + more;
      }
  }

  // Weights times the scales of their values, in units of v_unit; `shrink` learns how that unit has grown.
  __device__ __forceinline__ void weigh(uint32_t stage, int first_key, int kv_length, float (&weight)[kKeyTiles][kTiles][4],
                                        float (&shrink)[kTiles][2]) {
    const int key = first_key + threadIdx.x % 32 / 4;
    float scale[kKeyTiles][2], most = v_unit;
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        scale[j][h] = scale_at(stage + 2 * S::kHalf + S::kSlice * 2, j, h);
        if (key + j * 16 + h * 8 >= kv_length) scale[j][h] = 0;  // what lies behind may be anything
        most = fmaxf(most, scale[j][h]);
      }
    most = most_of(most);
    if (most > v_unit) {
      const float unit = __uint_as_float((__float_as_uint(most) + 0x007fffffu) & 0x7f800000u), ratio = v_unit / unit;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) shrink[n][0] *= ratio, shrink[n][1] *= ratio;
      v_unit = unit;
    }
    const float inverse = __uint_as_float(0x7f000000u - __float_as_uint(v_unit));
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) weight[j][n][c] *= scale[j][c / 2] * inverse;
  }

  __device__ __forceinline__ void add_values(uint32_t stage, const float (&weight)[kKeyTiles][kTiles][4]) {
    const int lane = threadIdx.x % 32;
    uint32_t p[kKeyTiles][kTiles][2];  // (keys, rows): mma's b
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) p[j][n][h] = transposed(Tensor<T>::pack(weight[j][n][2 * h], weight[j][n][2 * h + 1]));
    if constexpr (S::kCodes) {
      constexpr DType kType = code_type<typename S::E>;
#pragma unroll
      for (int j = 0; j < kKeyTiles; j += 2) {
        const uint32_t values = stage + S::kHalf + S::place(j * 16 + lane, 0);
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          uint32_t v[4];
          load_matrices_transposed(v, S::after(values, i));
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const uint32_t a[4] = {code_pair<kType, 0, 2>(v[2 * h]), code_pair<kType, 1, 3>(v[2 * h]),
                                   code_pair<kType, 0, 2>(v[2 * h + 1]), code_pair<kType, 1, 3>(v[2 * h + 1])};
#pragma unroll
            for (int n = 0; n < kTiles; ++n) Tensor<__half>::mma(out[i][n], a, p[j + h][n][0], p[j + h][n][1]);
          }
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j) {
        const uint32_t values = stage + S::kHalf + S::place(j * 16 + (lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          uint32_t a[4];
          load_matrices_transposed(a, S::after(values, 2 * i));
#pragma unroll
          for (int n = 0; n < kTiles; ++n) Tensor<T>::mma(out[i][n], a, p[j][n][0], p[j][n][1]);
        }
      }
    }
  }
};

}  // namespace maga::cuda
