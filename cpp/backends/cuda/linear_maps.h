// Tensor maps of a linear's operands: boxes of 128 bytes of columns in the 128-byte swizzle, zeros for what lies outside.
#pragma once

#include <cuda.h>

#include "backends/cuda/linear.h"

namespace maga::cuda {

// Rows of the weight; of a gated linear eight rows of the gate, the eight of up that belong to them, the next eight of the gate,
// ... as a 4-d map over the weight as it is: (k, 8, 2, n / 8).
CUtensorMap weight_map(const LinearArgs& args, int box_rows);
CUtensorMap token_map(const LinearArgs& args, int box_rows);

}  // namespace maga::cuda
