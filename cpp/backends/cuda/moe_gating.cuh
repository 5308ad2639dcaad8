// Gating of program/ops.h, as the kernels apply it to a gate and an up in registers.
#pragma once

#include <type_traits>

#include "program/ops.h"

namespace maga::cuda {

// kExact: for fp32 results; else exponentials whose relative error, about 1e-6, is far below the rounding to 16 bits.
template <bool kExact>
__device__ __forceinline__ float gated(const Gating& g, float gate, float up) {
  if (g.limit > 0) {
    gate = gate > g.limit ? g.limit : gate;  // NaN stays NaN
    up = up > g.limit ? g.limit : up < -g.limit ? -g.limit : up;
  }
  up += g.up_offset;
  switch (g.kind) {
    case ActivationKind::silu: {
      const float x = -g.alpha * gate;
      return gate / (1 + (kExact ? expf(x) : __expf(x))) * up;
    }
    case ActivationKind::gelu: return 0.5f * gate * (1 + erff(gate * 0.70710678118654752f)) * up;
    case ActivationKind::gelu_tanh:
      return 0.5f * gate * (1 + tanhf(0.79788456080286536f * (gate + 0.044715f * gate * gate * gate))) * up;
    case ActivationKind::relu: return (gate < 0 ? 0 : gate) * up;
    case ActivationKind::relu2: return (gate < 0 ? 0 : gate * gate) * up;
  }
  return 0;
}

}  // namespace maga::cuda
