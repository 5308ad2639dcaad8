// How the streaming kernels, of dense weights and of codes, store their sums.
#pragma once

#include "backends/cuda/linear_activation.cuh"

namespace maga::cuda {

// The first of a warp's 16 rows in its first 64-row tile.
struct StreamPlace {
  int in_cta;  // of the CTA's rows
  int row;     // of the weight's
  int token;   // the first
  int slice;   // of k
};

// A warp holds 16 rows of each 64-row tile, from place.row + 64 r on; a thread rows g and g + 8 of them, for tokens t * 2, t * 2 +
// 1 of every eight.
template <typename T, int kRows, int kTokens, int kTiles, typename Args>
__device__ __forceinline__ void store_stream(const Args& a, const float (&sums)[kTiles][kTokens / 2], const StreamPlace& place) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  auto store = [&](auto&& put) {  // put(token, r, value of row g, of row g + 8)
#pragma unroll
    for (int r = 0; r < kTiles; ++r)
      if (place.in_cta + r * 64 < kRows && place.row + r * 64 < a.rows)
#pragma unroll
        for (int j = 0; j < kTokens / 4; ++j) {
          const int token = place.token + j / 2 * 8 + t * 2 + j % 2, i = j / 2 * 4 + j % 2;
          if (token < a.m) put(token, r, sums[r][i], sums[r][i + 2]);
        }
  };
  const T* const bias = static_cast<const T*>(a.bias);
  if (a.gated) {
    // Rows 16 i .. 16 i + 7 are gates 8 i .. 8 i + 7, and the next eight are their ups.
    auto gated = [&]<ActivationKind kKind>() {
      store([&](int token, int r, float gate, float up) {
        const int column = (place.row + r * 64) / 2 + g;
        if (bias) gate += static_cast<float>(bias[column]), up += static_cast<float>(bias[a.rows / 2 + column]);
        static_cast<T*>(a.out)[token * a.out_stride + column] = static_cast<T>(activate<kKind>(gate) * up);
      });
    };
    switch (a.activation) {
      case ActivationKind::silu: gated.template operator()<ActivationKind::silu>(); break;
      case ActivationKind::gelu: gated.template operator()<ActivationKind::gelu>(); break;
      case ActivationKind::gelu_tanh: gated.template operator()<ActivationKind::gelu_tanh>(); break;
      case ActivationKind::relu: gated.template operator()<ActivationKind::relu>(); break;
      case ActivationKind::relu2: gated.template operator()<ActivationKind::relu2>(); break;
    }
  } else if (a.slabs) {
    float* const slab = a.slabs + static_cast<int64_t>(place.slice) * a.m * a.rows;
    store([&](int token, int r, float low, float high) {
      const int row = place.row + r * 64 + g;
      float* const to = slab + static_cast<int64_t>(token) * a.rows + row;
      if (row < a.rows) to[0] = low;
      if (row + 8 < a.rows) to[8] = high;
    });
  } else {
    auto finish = [&](int token, int row, float value) {
      if (row >= a.rows) return;
      if (bias) value += static_cast<float>(bias[row]);
      if (a.residual) value += static_cast<float>(static_cast<const T*>(a.residual)[token * a.residual_stride + row]);
      if (a.out_f32)
        static_cast<float*>(a.out)[token * a.out_stride + row] = value;
      else
        static_cast<T*>(a.out)[token * a.out_stride + row] = static_cast<T>(value);
    };
    store([&](int token, int r, float low, float high) {
      const int row = place.row + r * 64 + g;
      finish(token, row, low);
      finish(token, row + 8, high);
    });
  }
}

}  // namespace maga::cuda
