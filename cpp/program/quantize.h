// Rounding of dense weights at load, without calibration.
#pragma once

#include "program/weight.h"

namespace maga {

// Symmetric codes of `bits` (2 to 8) in groups of `group` columns, which must divide them: codes - 2^(bits - 1), times a scale that
// an fp16 holds where the range allows. At 8 bits a group's largest value gets the largest code; below, the scale is the one among
// a few that leaves the least squared error. Values that are not finite are refused, naming `name`.
Affine quantize(const Tensor& values, int bits, int64_t group, const std::string& name);
// To e4m3 with a scale a row, by which its largest value gets the largest code. Refuses as `quantize` does.
Float8 quantize_fp8(const Tensor& values, const std::string& name);

}  // namespace maga
