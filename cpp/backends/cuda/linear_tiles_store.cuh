// How a tile leaves the registers: a warp's 16 tokens by kRows weight rows, as wgmma holds them: a thread has tokens g and g + 8,
// and of every eight rows the two from 2 t on (g = lane / 4, t = lane % 4).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backends/cuda/linear_activation.cuh"
#include "backends/cuda/linear_tiles_args.h"

namespace maga::cuda {

__device__ __forceinline__ uint32_t pack_two(__nv_bfloat16, float a, float b) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(a, b);
  return reinterpret_cast<const uint32_t&>(two);
}
__device__ __forceinline__ uint32_t pack_two(__half, float a, float b) {
  const __half2 two = __floats2half2_rn(a, b);
  return reinterpret_cast<const uint32_t&>(two);
}
__device__ __forceinline__ float2 unpack_two(__nv_bfloat16, uint32_t two) {
  return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(two));
}
__device__ __forceinline__ float2 unpack_two(__half, uint32_t two) { return __half22float2(reinterpret_cast<const __half2&>(two)); }

__device__ __forceinline__ void store_shared(uint32_t to, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t to, const uint4& v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ uint32_t load_shared(uint32_t from) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
  return value;
}
__device__ __forceinline__ uint4 load_shared_4(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
  return v;
}

// Columns of T in rows of 16 bytes a thread, by way of the warp's staging: 16 tokens by 32 columns at a time, its 16-byte pieces
// permuted so that neither side meets bank conflicts. value(block, v): a thread's four results of eight columns, token g first.
template <typename T, int kBlocks, bool kResidual, typename Value>
__device__ __forceinline__ void store_rows(const TileArgs& a, int token, int column, int n, uint32_t staging, Value&& value) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  auto piece = [&](int row, int block) { return staging + row * 64 + (block ^ (row >> 1 & 3)) * 16; };
  const uint32_t moved = piece(g, t);  // what this thread moves as a whole, and 512 bytes on the same of token g + 8
#pragma unroll
  for (int first = 0; first < kBlocks; first += 4) {
    const int to = column + (first + t) * 8;
    const bool in = (kBlocks % 4 == 0 || first + t < kBlocks) && to < n;
    const bool low = in && token + g < a.m, high = in && token + g + 8 < a.m;
    if constexpr (kResidual) {
      const T* const from = static_cast<const T*>(a.residual) + (token + g) * a.residual_stride + to;
      uint4 l{}, h{};
      if (low) l = *reinterpret_cast<const uint4*>(from);
      if (high) h = *reinterpret_cast<const uint4*>(from + 8 * a.residual_stride);
      store_shared(moved, l);
      store_shared(moved + 512, h);
      __syncwarp();
    }
#pragma unroll
    for (int b = 0; b < 4 && first + b < kBlocks; ++b) {
      float v[4];
      value(first + b, v);
      const uint32_t at = piece(g, b) + t * 4;
      if constexpr (kResidual) {
        const float2 l = unpack_two(T{}, load_shared(at)), h = unpack_two(T{}, load_shared(at + 512));
        v[0] += l.x, v[1] += l.y, v[2] += h.x, v[3] += h.y;
      }
      store_shared(at, pack_two(T{}, v[0], v[1]));
      store_shared(at + 512, pack_two(T{}, v[2], v[3]));
    }
    __syncwarp();
    T* const out = static_cast<T*>(a.out) + (token + g) * a.out_stride + to;
    if (low) *reinterpret_cast<uint4*>(out) = load_shared_4(moved);
    if (high) *reinterpret_cast<uint4*>(out + 8 * a.out_stride) = load_shared_4(moved + 512);
    __syncwarp();
  }
}

// `token`: the warp's first; `row`: the tile's first.
template <typename T, int kRows>
__device__ __forceinline__ void store_tile(const TileArgs& a, const float (&sums)[kRows / 2], int token, int row, int slice,
                                           uint32_t staging) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const T* const bias = static_cast<const T*>(a.bias);
  if (a.gated) {
    const int n = a.rows / 2;
    auto gated = [&](auto&& act) {
      store_rows<T, kRows / 16, false>(a, token, row / 2, n, staging, [&](int block, float (&v)[4]) {
        float gate_bias[2] = {}, up_bias[2] = {};
        const int column = row / 2 + block * 8 + t * 2;
        if (bias && column < n)
          for (int i = 0; i < 2; ++i)
            gate_bias[i] = static_cast<float>(bias[column + i]), up_bias[i] = static_cast<float>(bias[n + column + i]);
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = act(sums[block * 8 + i] + gate_bias[i % 2]) * (sums[block * 8 + 4 + i] + up_bias[i % 2]);
      });
    };
    switch (a.activation) {
      case ActivationKind::silu: gated([](float x) { return activate<ActivationKind::silu>(x); }); break;
      case ActivationKind::gelu: gated([](float x) { return activate<ActivationKind::gelu>(x); }); break;
      case ActivationKind::gelu_tanh: gated([](float x) { return activate<ActivationKind::gelu_tanh>(x); }); break;
      case ActivationKind::relu: gated([](float x) { return activate<ActivationKind::relu>(x); }); break;
    }
  } else if (a.slabs || a.out_f32) {  // whole sectors of 32 bytes as they are
    float* const out = a.slabs ? a.slabs + int64_t{slice} * a.m * a.rows : static_cast<float*>(a.out);
    const int64_t stride = a.slabs ? a.rows : a.out_stride;
#pragma unroll
    for (int block = 0; block < kRows / 8; ++block) {
      const int column = row + block * 8 + t * 2;
      if (column >= a.rows) break;
      float2 add{};
      if (bias) add = {static_cast<float>(bias[column]), static_cast<float>(bias[column + 1])};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t at = token + g + half * 8;
        if (at >= a.m) continue;
        float2 v = {sums[block * 4 + half * 2] + add.x, sums[block * 4 + half * 2 + 1] + add.y};
        if (a.residual) {
          const T* const from = static_cast<const T*>(a.residual) + at * a.residual_stride + column;
          v.x += static_cast<float>(from[0]), v.y += static_cast<float>(from[1]);
        }
        *reinterpret_cast<float2*>(out + at * stride + column) = v;
      }
    }
  } else {
    auto plain = [&](int block, float (&v)[4]) {
      const int column = row + block * 8 + t * 2;
      float add[2] = {};
      if (bias && column < a.rows) add[0] = static_cast<float>(bias[column]), add[1] = static_cast<float>(bias[column + 1]);
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = sums[block * 4 + i] + add[i % 2];
    };
    if (a.residual)
      store_rows<T, kRows / 8, true>(a, token, row, a.rows, staging, plain);
    else
      store_rows<T, kRows / 8, false>(a, token, row, a.rows, staging, plain);
  }
}

}  // namespace maga::cuda
