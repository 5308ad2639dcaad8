// How a tile leaves the registers: a warp's 16 tokens by kRows weight rows, as wgmma holds them: a thread has tokens g and g + 8,
// and of every eight rows the two from 2 t on (g = lane / 4, t = lane % 4).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backends/cuda/linear_activation.cuh"
#include "backends/cuda/linear_shared.cuh"
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

// Written out, as the compiler makes four stores of some of these.
__device__ __forceinline__ void store_global(void* to, const uint4& v) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
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

enum class Residual { none, fetched, fetched_ahead };  // ahead: while the rows before are on their way, at the cost of 16 registers

// What a warp writes: 16 rows of (m, n) from `out` on, of which `rows` by `columns` are inside.
template <typename Out>
struct Target {
  Out* out;
  int64_t stride;
  int rows, columns;
};

// Through the warp's staging, 16 tokens by 128 bytes at a time, so that whole lines leave it. The 16-byte pieces of a row are
// permuted so that neither side meets bank conflicts. value(block, v): a thread's four results of eight columns, token g first.
//
// A tile is stored once, by instructions that no loop has fetched before: what counts is that they are few. So all that is the same
// from line to line is computed before the first.
template <typename T, typename Out, int kBlocks, Residual kResidual, typename Value>
__device__ __forceinline__ void store_rows(const Target<Out>& to, const T* residual, int64_t residual_stride, uint32_t staging,
                                           Value&& value) {
  constexpr int kPiece = 16 / sizeof(Out);            // elements
  constexpr int kTogether = 128 / (8 * sizeof(Out));  // blocks
  constexpr int kMoves = 4;                           // a row is moved by eight lanes, four rows at a time
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  auto place = [&](int row, int piece) { return staging + row * 128 + (piece ^ (sizeof(Out) == 2 ? row % 8 : row % 4 * 2)) * 16; };
  uint32_t put[kTogether], moved[2];  // of token g, eight tokens on: + 1024; of the first rows moved, eight rows on: + 1024
#pragma unroll
  for (int b = 0; b < kTogether; ++b) put[b] = sizeof(Out) == 2 ? place(g, b) + t * 4 : place(g, b * 2 + t / 2) + t % 2 * 8;
#pragma unroll
  for (int i = 0; i < 2; ++i) moved[i] = place(lane / 8 + i * 4, lane % 8);
  const int columns = min(to.columns, kBlocks * 8) - lane % 8 * kPiece, rows = to.rows - lane / 8;
  Out* const out = to.out + lane / 8 * to.stride + lane % 8 * kPiece;
  const T* const from = residual + lane / 8 * residual_stride + lane % 8 * kPiece;
  const int64_t step = 4 * to.stride, residual_step = 4 * residual_stride;
  auto fetch = [&](int first, int i) {
    return i * 4 < rows && first * 8 < columns ? *reinterpret_cast<const uint4*>(from + i * residual_step + first * 8) : uint4{};
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
#pragma unroll
      for (int i = 0; i < kMoves; ++i) {
        const uint4 line = kResidual == Residual::fetched_ahead ? ahead[i] : fetch(first, i);
        store_shared(moved[i % 2] + i / 2 * 1024, line);
      }
      if (kResidual == Residual::fetched_ahead && first + kTogether < kBlocks) fetch_ahead(first + kTogether);
      __syncwarp();
    }
#pragma unroll
    for (int b = 0; b < kTogether && first + b < kBlocks; ++b) {
      float v[4];
      value(first + b, v);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t at = put[b] + half * 1024;
        if constexpr (sizeof(Out) == 4) {
          store_shared(at, v[half * 2], v[half * 2 + 1]);
        } else {
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
    uint4 lines[kMoves];
#pragma unroll
    for (int i = 0; i < kMoves; ++i) lines[i] = load_shared_4(moved[i % 2] + i / 2 * 1024);
#pragma unroll
    for (int i = 0; i < kMoves; ++i)
      if (i * 4 < rows && first * 8 < columns) store_global(out + i * step + first * 8, lines[i]);
    __syncwarp();
  }
}

// sums += what add(row of the weight, token) says, for those inside; seldom, so it need not be fast.
template <int kBlocks, typename Add>
__device__ __forceinline__ void add_to_sums(float (&sums)[kBlocks * 4], Add&& add) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < kBlocks * 4; ++i) sums[i] += add(i / 4 * 8 + t * 2 + i % 2, g + i % 4 / 2 * 8);
}

// Row `i` of a tile whose first is `row`, in the weight; gated: eight of the gate, then the eight of up that belong to them. -1:
// outside.
__device__ __forceinline__ int weight_row(const TileArgs& a, int row, int i) {
  if (!a.gated) return row + i < a.rows ? row + i : -1;
  const int n = a.rows / 2, at = row / 2 + i / 16 * 8 + i % 8;
  return at < n ? (i % 16 >= 8 ? n + at : at) : -1;
}

// Each row of an e4m3 weight times its scale.
template <int kBlocks>
__device__ __forceinline__ void scale_rows(const TileArgs& a, float (&sums)[kBlocks * 4], int row) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = weight_row(a, row, block * 8 + t * 2 + i);
      const float scale = at < 0 ? 0.f : a.weight_scale[at];
      sums[block * 4 + i] *= scale, sums[block * 4 + i + 2] *= scale;
    }
}

// `token`: the warp's first; `row`: the tile's first.
template <typename T, int kGroups, int kRows>
__device__ __forceinline__ void store_tile(const TileArgs& a, float (&sums)[kRows / 2], int token, int row, int slice,
                                           uint32_t staging) {
  constexpr int kBlocks = kRows / 8;
  const int n = a.gated ? a.rows / 2 : a.rows, column = a.gated ? row / 2 : row, rows_left = a.m - token;
  if (a.bias) {
    const T* const bias = static_cast<const T*>(a.bias);
    add_to_sums<kBlocks>(sums, [&](int i, int) {
      const int at = weight_row(a, row, i);
      return at < 0 ? 0.f : static_cast<float>(bias[at]);
    });
  }
  const int64_t first = int64_t{token} * a.out_stride + column;
  const Target<T> to{static_cast<T*>(a.out) + first, a.out_stride, rows_left, n - column};
  auto plain = [&](int block, float (&v)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = sums[block * 4 + i];
  };
  if (a.gated) {
    auto gated = [&](auto&& act) {
      store_rows<T, T, kBlocks / 2, Residual::none>(to, nullptr, 0, staging, [&](int block, float (&v)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = act(sums[block * 8 + i]) * sums[block * 8 + 4 + i];
      });
    };
    switch (a.activation) {
      case ActivationKind::silu: gated([](float x) { return activate<ActivationKind::silu>(x); }); break;
      case ActivationKind::gelu: gated([](float x) { return activate<ActivationKind::gelu>(x); }); break;
      case ActivationKind::gelu_tanh: gated([](float x) { return activate<ActivationKind::gelu_tanh>(x); }); break;
      case ActivationKind::relu: gated([](float x) { return activate<ActivationKind::relu>(x); }); break;
      case ActivationKind::relu2: gated([](float x) { return activate<ActivationKind::relu2>(x); }); break;
    }
    return;
  }
  const T* const residual = static_cast<const T*>(a.residual) + int64_t{token} * a.residual_stride + column;
  if (a.slabs || a.out_f32) {
    if (a.residual)
      add_to_sums<kBlocks>(sums, [&](int i, int of) {
        return of < rows_left && column + i < n ? static_cast<float>(residual[of * a.residual_stride + i]) : 0.f;
      });
    const Target<float> wide = a.slabs
                                   ? Target<float>{a.slabs + (int64_t{slice} * a.m + token) * n + column, n, rows_left, n - column}
                                   : Target<float>{static_cast<float*>(a.out) + first, a.out_stride, rows_left, n - column};
    store_rows<T, float, kBlocks, Residual::none>(wide, nullptr, 0, staging, plain);
  } else if (a.residual) {
    store_rows<T, T, kBlocks, kGroups == 2 ? Residual::fetched_ahead : Residual::fetched>(to, residual, a.residual_stride, staging,
                                                                                          plain);
  } else {
    store_rows<T, T, kBlocks, Residual::none>(to, nullptr, 0, staging, plain);
  }
}

}  // namespace maga::cuda
