// The parts of attention_mma that know 8-bit codes. A key's scale meets its scores, a value's scale its weights; the codes
// themselves become fp16 numbers, exactly, in registers.
//
// An 8 x 8 matrix of ldmatrix is 8 keys by 16 codes here. A thread gets four neighbouring codes of a key, which are its share of 16
// columns in a product with q (any order will do, if q has the same); or, transposed, two of each of two keys, which are two
// columns of values 2 c and 2 c + 1, so that of 16 columns the even ones come first: see MmaRows::column.
#pragma once

#include "backends/cuda/attention_mma_shape.cuh"

namespace maga::cuda {

template <typename S>
struct MmaCodes {};

template <typename S>
  requires S::kCodes
struct MmaCodes<S> {
  static constexpr DType kType = S::E::kType;
  static constexpr int kKeys = S::kSlice / 8;
  static_assert(S::kSlice % 32 == 0);
  float q_unit[2];  // q is in these units, so that fp16 holds it
  float v_unit;     // and values in this one: a power of two that no scale of a value has exceeded

  // Row r of this thread: q[16-column group][2 * half + row].
  __device__ void start(const MmaArgs& args, const uint32_t* row, uint32_t (&q)[S::kHeadDim / 16][4], int r) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < S::kHeadDim / 8; ++i) q[i / 2][i % 2 * 2 + r] = row[i / 2 * 8 + lane % 4 * 2 + i % 2];
    q_unit[r] = 1;
    v_unit = 0x1p-110f;
    if (!args.bf16) return;
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < S::kHeadDim / 8; ++i) {
      const uint32_t pair = q[i / 2][i % 2 * 2 + r];
      most = max(most, max(pair << 16 & 0x7fff0000u, pair & 0x7fff0000u));
    }
    most = max(most, __shfl_xor_sync(~0u, most, 1));
    most = max(most, __shfl_xor_sync(~0u, most, 2));
    const uint32_t unit = q_unit_bits(most);
    const float inverse = __uint_as_float(0x7f000000u - unit);
    q_unit[r] = __uint_as_float(unit);
#pragma unroll
    for (int i = 0; i < S::kHeadDim / 8; ++i) {
      uint32_t& pair = q[i / 2][i % 2 * 2 + r];
      pair = Tensor<__half>::pack(__uint_as_float(pair << 16) * inverse, __uint_as_float(pair & 0xffff0000u) * inverse);
    }
  }

  __device__ __forceinline__ void scores(const MmaArgs& args, uint32_t stage, const uint32_t (&q)[S::kHeadDim / 16][4],
                                         float (&score)[kKeys][4]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < S::kPieces; ++i)
#pragma unroll
      for (int j = 0; j < kKeys; j += 4) {
        uint32_t k[4];
        load_matrices(k, stage + S::place(j * 8 + lane, i));
#pragma unroll
        for (int m = 0; m < 4; ++m)
          Tensor<__half>::mma(score[j + m], q[i], code_pair<kType, 0, 1>(k[m]), code_pair<kType, 2, 3>(k[m]));
      }
    const float scale = args.scale * kLog2e * code_unit<kType>(), row_scale[2] = {scale * q_unit[0], scale * q_unit[1]};
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
      const uint32_t two = load_shared(stage + 2 * S::kHalf + (j * 8 + lane % 4 * 2) * 2);
      const float key_scale[2] = {__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u)};
#pragma unroll
      for (int c = 0; c < 4; ++c) score[j][c] *= row_scale[c / 2] * key_scale[c % 2];
    }
  }

  // Weights times the scales of their values, in units of v_unit; `shrink` learns how that unit has grown.
  __device__ __forceinline__ void weigh(uint32_t stage, int first_key, int kv_length, float (&weight)[kKeys][4],
                                        float (&shrink)[2]) {
    const int lane = threadIdx.x % 32;
    float scale[kKeys][2], most = v_unit;
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
      const uint32_t two = load_shared(stage + 2 * S::kHalf + S::kSlice * 2 + (j * 8 + lane % 4 * 2) * 2);
      scale[j][0] = __uint_as_float(two << 16), scale[j][1] = __uint_as_float(two & 0xffff0000u);
    }
    if (first_key + S::kSlice > kv_length) {  // what lies behind may be anything
#pragma unroll
      for (int j = 0; j < kKeys; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (first_key + j * 8 + lane % 4 * 2 + c >= kv_length) scale[j][c] = 0;
    }
#pragma unroll
    for (int j = 0; j < kKeys; ++j) most = fmaxf(most, fmaxf(scale[j][0], scale[j][1]));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    if (most > v_unit) {
      const float unit = __uint_as_float((__float_as_uint(most) + 0x007fffffu) & 0x7f800000u), ratio = v_unit / unit;
      shrink[0] *= ratio, shrink[1] *= ratio;
      v_unit = unit;
    }
    const float inverse = __uint_as_float(0x7f000000u - __float_as_uint(v_unit));
#pragma unroll
    for (int j = 0; j < kKeys; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) weight[j][c] *= scale[j][c % 2] * inverse;
  }

  __device__ __forceinline__ void add_values(uint32_t stage, const float (&weight)[kKeys][4],
                                             float (&out)[S::kHeadDim / 8][4]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < kKeys; j += 4) {
      uint32_t p[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h) Tensor<__half>::pack_rows(p[h], weight[j + 2 * h], weight[j + 2 * h + 1]);
#pragma unroll
      for (int i = 0; i < S::kPieces; ++i) {
        uint32_t v[4];
        load_matrices_transposed(v, stage + S::kHalf + S::place(j * 8 + lane, i));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          Tensor<__half>::mma(out[2 * i], p[h], code_pair<kType, 0, 2>(v[2 * h]), code_pair<kType, 0, 2>(v[2 * h + 1]));
          Tensor<__half>::mma(out[2 * i + 1], p[h], code_pair<kType, 1, 3>(v[2 * h]), code_pair<kType, 1, 3>(v[2 * h + 1]));
        }
      }
    }
  }

  __device__ float values_unit() const { return v_unit * code_unit<kType>(); }
};

}  // namespace maga::cuda
