// A pass over the op list that replaces neighbours by the fused ops a backend takes.
#pragma once

#include "program/program.h"

namespace maga {

struct FusedOps {
  bool linear_residual = false;  // Linear, Add        -> Linear with residual; Moe likewise
  bool gated_linear = false;     // Linear, Activation -> GatedLinear
  bool prepare_qkv = false;      // Norm, Norm, Rope, Rope, K/V write of Attention -> PrepareQkv, Attention
};

Program fuse(const Program& program, FusedOps allowed);

}  // namespace maga
