// The activation of a gated linear, as its kernels apply it to a gate in registers.
#pragma once

#include "program/ops.h"

namespace maga::cuda {

template <ActivationKind kKind>
__device__ __forceinline__ float activate(float x) {
  if constexpr (kKind == ActivationKind::silu) return __fdividef(x, 1.f + __expf(-x));
  if constexpr (kKind == ActivationKind::gelu) return 0.5f * x * (1.f + erff(x * 0.70710678f));
  if constexpr (kKind == ActivationKind::gelu_tanh) {
    const float u = 0.79788456f * (x + 0.044715f * x * x * x);
    return x * (1.f - __fdividef(1.f, 1.f + __expf(2.f * u)));  // 0.5 x (1 + tanh u)
  }
  const float y = fmaxf(x, 0.f);
  return kKind == ActivationKind::relu2 ? y * y : y;
}

}  // namespace maga::cuda
