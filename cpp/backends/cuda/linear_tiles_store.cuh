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
__device__ __forceinline__ void store_shared(uint32_t to, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(a), "f"(b) : "memory");
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

// Brings the residual of a warp's 16 tokens by kRows weight rows into the L2, while the tile is being computed.
template <typename T, int kRows>
__device__ __forceinline__ void prefetch_residual(const TileArgs& a, int token, int row) {
  const int lane = threadIdx.x % 32, column = row + lane / 16 * 64;
#pragma unroll
  for (int more = 0; more < kRows; more += 128)
    if (token + lane % 16 < a.m && column + more < a.rows)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const T*>(a.residual) + (token + lane % 16) * a.residual_stride +
                                                    column + more));
}

// Where a warp's results go: columns from `column` on of its 16 tokens, of (m, n).
template <typename Out>
struct Target {
  Out* out;
  int64_t stride;
  int token, column, m, n;
};

enum class Residual { none, fetched, fetched_ahead };  // ahead: while the rows before are on their way, at the cost of 16 registers

// Through the warp's staging, 16 tokens by 128 bytes at a time, so that whole lines leave it. The 16-byte pieces of a row are
// permuted so that neither side meets bank conflicts. value(block, v): a thread's four results of eight columns, token g first.
template <typename T, typename Out, int kBlocks, Residual kResidual, typename Value>
__device__ __forceinline__ void store_rows(const TileArgs& a, const Target<Out>& to, uint32_t staging, Value&& value) {
  constexpr int kTogether = 16 / sizeof(Out), kMoves = 4;  // blocks; a row is moved by eight lanes
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  auto piece = [&](int row, int i) { return staging + row * 128 + (i ^ (sizeof(Out) == 2 ? row % 8 : row % 4 * 2)) * 16; };
  auto moved_row = [&](int move) { return lane / 8 + move * 4; };
  auto moved_column = [&](int first) { return to.column + first * 8 + lane % 8 * (16 / static_cast<int>(sizeof(Out))); };
  auto moves = [&](int first, int move) {
    const bool in_tile = first + kTogether <= kBlocks || lane % 8 * (16 / static_cast<int>(sizeof(Out))) < (kBlocks - first) * 8;
    return in_tile && moved_column(first) < to.n && to.token + moved_row(move) < to.m;
  };
  auto fetch = [&](int first, int move) {
    const T* const from =
        static_cast<const T*>(a.residual) + (to.token + moved_row(move)) * a.residual_stride + moved_column(first);
    return moves(first, move) ? *reinterpret_cast<const uint4*>(from) : uint4{};
  };
  uint4 ahead[kMoves];
  auto fetch_ahead = [&](int first) {
#pragma unroll
    for (int i = 0; i < kMoves; ++i) ahead[i] = fetch(first, i);
  };
  if constexpr (kResidual == Residual::fetched_ahead) fetch_ahead(0);
#pragma unroll
  for (int first = 0; first < kBlocks; first += kTogether) {
    if constexpr (kResidual != Residual::none) {
      if constexpr (kResidual == Residual::fetched_ahead) {
#pragma unroll
        for (int i = 0; i < kMoves; ++i) store_shared(piece(moved_row(i), lane % 8), ahead[i]);
        if (first + kTogether < kBlocks) fetch_ahead(first + kTogether);
      } else {
#pragma unroll 1
        for (int i = 0; i < kMoves; ++i) store_shared(piece(moved_row(i), lane % 8), fetch(first, i));
      }
      __syncwarp();
    }
#pragma unroll
    for (int b = 0; b < kTogether && first + b < kBlocks; ++b) {
      float v[4];
      value(first + b, v);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if constexpr (sizeof(Out) == 4) {
          store_shared(piece(g + half * 8, b * 2 + t / 2) + t % 2 * 8, v[half * 2], v[half * 2 + 1]);
        } else {
          const uint32_t at = piece(g + half * 8, b) + t * 4;
          float2 sum = {v[half * 2], v[half * 2 + 1]};
          if constexpr (kResidual != Residual::none) {
            const float2 more = unpack_two(T{}, load_shared(at));
            sum.x += more.x, sum.y += more.y;
          }
          store_shared(at, pack_two(T{}, sum.x, sum.y));
        }
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kMoves; ++i)
      if (moves(first, i))
        *reinterpret_cast<uint4*>(to.out + (to.token + moved_row(i)) * to.stride + moved_column(first)) =
            load_shared_4(piece(moved_row(i), lane % 8));
    __syncwarp();
  }
}

// `token`: the warp's first; `row`: the tile's first.
template <typename T, int kGroups, int kRows>
__device__ __forceinline__ void store_tile(const TileArgs& a, const float (&sums)[kRows / 2], int token, int row, int slice,
                                           uint32_t staging) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const T* const bias = static_cast<const T*>(a.bias);
  // Of the two columns of a block that this thread has.
  auto bias_of = [&](int column, int n, const T* from) {
    float2 two{};
    if (bias && column < n) two = {static_cast<float>(from[column]), static_cast<float>(from[column + 1])};
    return two;
  };
  auto plain = [&](int block, float (&v)[4]) {
    const float2 add = bias_of(row + block * 8 + t * 2, a.rows, bias);
    for (int i = 0; i < 4; ++i) v[i] = sums[block * 4 + i] + (i % 2 ? add.y : add.x);
  };
  if (a.gated) {
    const int n = a.rows / 2;
    const Target<T> to{static_cast<T*>(a.out), a.out_stride, token, row / 2, a.m, n};
    auto gated = [&](auto&& act) {
      store_rows<T, T, kRows / 16, Residual::none>(a, to, staging, [&](int block, float (&v)[4]) {
        const int column = row / 2 + block * 8 + t * 2;
        const float2 gate = bias_of(column, n, bias), up = bias_of(column, n, bias + n);
        for (int i = 0; i < 4; ++i)
          v[i] = act(sums[block * 8 + i] + (i % 2 ? gate.y : gate.x)) * (sums[block * 8 + 4 + i] + (i % 2 ? up.y : up.x));
      });
    };
    switch (a.activation) {
      case ActivationKind::silu: gated([](float x) { return activate<ActivationKind::silu>(x); }); break;
      case ActivationKind::gelu: gated([](float x) { return activate<ActivationKind::gelu>(x); }); break;
      case ActivationKind::gelu_tanh: gated([](float x) { return activate<ActivationKind::gelu_tanh>(x); }); break;
      case ActivationKind::relu: gated([](float x) { return activate<ActivationKind::relu>(x); }); break;
      case ActivationKind::relu2: gated([](float x) { return activate<ActivationKind::relu2>(x); }); break;
    }
  } else if (a.slabs || a.out_f32) {
    const Target<float> to{a.slabs ? a.slabs + int64_t{slice} * a.m * a.rows : static_cast<float*>(a.out),
                           a.slabs ? a.rows : a.out_stride,
                           token,
                           row,
                           a.m,
                           a.rows};
    store_rows<T, float, kRows / 8, Residual::none>(a, to, staging, [&](int block, float (&v)[4]) {
      plain(block, v);
      const int column = row + block * 8 + t * 2;
      if (a.residual && column < a.rows)  // of another type than the result: seldom, and not worth a path of its own
        for (int i = 0; i < 4; ++i)
          if (const int at = token + g + i / 2 * 8; at < a.m)
            v[i] += static_cast<float>(static_cast<const T*>(a.residual)[at * a.residual_stride + column + i % 2]);
    });
  } else {
    const Target<T> to{static_cast<T*>(a.out), a.out_stride, token, row, a.m, a.rows};
    if (a.residual)
      store_rows<T, T, kRows / 8, kGroups == 2 ? Residual::fetched_ahead : Residual::fetched>(a, to, staging, plain);
    else
      store_rows<T, T, kRows / 8, Residual::none>(a, to, staging, plain);
  }
}

}  // namespace maga::cuda
