// How the kernels for codes store their sums.
#pragma once

#include <type_traits>

#include "backends/cuda/linear_activation.cuh"
#include "backends/cuda/moe_gating.cuh"

namespace maga::cuda {

// The first of a warp's 16 rows in its first 64-row tile.
struct AffinePlace {
  int in_cta;  // of the CTA's rows
  int row;     // of the weight's
  int token;   // the first
  int slice;   // of k
};

// A warp holds 16 rows of each 64-row tile, from place.row + 64 r on; a thread rows g and g + 8 of them, for tokens t * 2, t * 2 +
// 1 of every eight. These instructions run once a tile, and no loop has fetched them before: what is the same from value to value
// is computed before the first.
template <typename T, int kRows, int kTokens, int kTiles, typename Args>
__device__ __forceinline__ void store_affine(const Args& a, const float (&sums)[kTiles][kTokens / 2], const AffinePlace& place) {
  const int lane = threadIdx.x % 32, g = lane / 4, first = place.token + lane % 4 * 2, left = a.m - first, row = place.row + g;
  auto store = [&](auto&& put) {  // put(tokens after the first, r, value of row g, of row g + 8)
#pragma unroll
    for (int r = 0; r < kTiles; ++r)
      if (place.in_cta + r * 64 < kRows && place.row + r * 64 < a.rows)
#pragma unroll
        for (int j = 0; j < kTokens / 4; ++j) {
          const int token = j / 2 * 8 + j % 2, i = j / 2 * 4 + j % 2;
          if (token < left) put(token, r, sums[r][i], sums[r][i + 2]);
        }
  };
  // A value of each of a thread's rows.
  struct Pair {
    float low = 0, high = 0;
  };
  const T* const bias = static_cast<const T*>(a.bias);
  auto bias_of = [&](int low, int high, int rows) {
    return Pair{bias && low < rows ? static_cast<float>(bias[low]) : 0.f,
                bias && high < rows ? static_cast<float>(bias[high]) : 0.f};
  };
  Pair biases[kTiles];
  const int stride = static_cast<int>(a.slabs ? a.rows : a.out_stride);
  auto at = [&](auto* out, int token) { return out + static_cast<int64_t>(token) * stride; };
  if (a.gated) {
    // Rows 16 i .. 16 i + 7 are gates 8 i .. 8 i + 7, and the next eight are their ups.
    const int column = place.row / 2 + g;
#pragma unroll
    for (int r = 0; r < kTiles; ++r) biases[r] = bias_of(column + r * 32, a.rows / 2 + column + r * 32, a.rows);
    T* const out = at(static_cast<T*>(a.out), first) + column;
    auto gated = [&]<ActivationKind kKind>() {
      store([&](int token, int r, float gate, float up) {
        at(out, token)[r * 32] = static_cast<T>(activate<kKind>(gate + biases[r].low) * (up + biases[r].high));
      });
    };
    if constexpr (requires { a.gating; }) {
      store([&](int token, int r, float gate, float up) {
        at(out, token)[r * 32] = static_cast<T>(cuda::gated<false>(a.gating, gate + biases[r].low, up + biases[r].high));
      });
    } else {
      switch (a.activation) {
        case ActivationKind::silu: gated.template operator()<ActivationKind::silu>(); break;
        case ActivationKind::gelu: gated.template operator()<ActivationKind::gelu>(); break;
        case ActivationKind::gelu_tanh: gated.template operator()<ActivationKind::gelu_tanh>(); break;
        case ActivationKind::relu: gated.template operator()<ActivationKind::relu>(); break;
        case ActivationKind::relu2: gated.template operator()<ActivationKind::relu2>(); break;
      }
    }
    return;
  }
  auto put_rows = [&](auto* out, int r, float low, float high) {
    using Out = std::remove_pointer_t<decltype(out)>;
    if (row + r * 64 < a.rows) out[r * 64] = static_cast<Out>(low);
    if (row + r * 64 + 8 < a.rows) out[r * 64 + 8] = static_cast<Out>(high);
  };
  if (a.slabs) {
    float* const out = at(a.slabs + static_cast<int64_t>(place.slice) * a.m * a.rows, first) + row;
    store([&](int token, int r, float low, float high) { put_rows(at(out, token), r, low, high); });
    return;
  }
#pragma unroll
  for (int r = 0; r < kTiles; ++r) biases[r] = bias_of(row + r * 64, row + r * 64 + 8, a.rows);
  const int residual_stride = static_cast<int>(a.residual_stride);
  const T* const residual = static_cast<const T*>(a.residual) + static_cast<int64_t>(first) * residual_stride + row;
  auto finish = [&](auto* out) {
    store([&](int token, int r, float low, float high) {
      low += biases[r].low, high += biases[r].high;
      if (a.residual) {
        const T* const more = residual + static_cast<int64_t>(token) * residual_stride + r * 64;
        if (row + r * 64 < a.rows) low += static_cast<float>(more[0]);
        if (row + r * 64 + 8 < a.rows) high += static_cast<float>(more[8]);
      }
      put_rows(at(out, token), r, low, high);
    });
  };
  a.out_f32 ? finish(at(static_cast<float*>(a.out), first) + row) : finish(at(static_cast<T*>(a.out), first) + row);
}

}  // namespace maga::cuda
