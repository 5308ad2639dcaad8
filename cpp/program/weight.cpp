#include "program/weight.h"

#include "core/codes.h"

namespace maga {

void check(const WeightSpec& spec, const Float8& weight) {
  MAGA_REQUIRE(spec.shape.size() == 2 && weight.codes.shape == spec.shape, "weight \"", spec.name,
               "\" does not have the shape that the program states");
  MAGA_REQUIRE(weight.codes.dtype == DType::u8 && weight.scale.dtype == DType::f32, "weight \"", spec.name, "\" has codes of ",
               name_of(weight.codes.dtype), " and scales of ", name_of(weight.scale.dtype), "; uint8 and fp32 are needed");
  MAGA_REQUIRE(weight.high > 0 && weight.wide > 0, "weight \"", spec.name, "\" has scales of blocks of ", weight.high, " by ",
               weight.wide);
  const std::vector<int64_t> blocks{(spec.shape[0] + weight.high - 1) / weight.high,
                                    (spec.shape[1] + weight.wide - 1) / weight.wide};
  MAGA_REQUIRE(weight.scale.shape == blocks, "weight \"", spec.name, "\": the scales need the shape (", blocks[0], ", ", blocks[1],
               ")");
}

float value_at(const Float8& weight, int64_t row, int64_t col) {
  const int64_t cols = weight.codes.shape[1], block = row / weight.high * weight.scale.shape[1] + col / weight.wide;
  return weight.scale.as<float>()[block] * e4m3_to_float(weight.codes.as<uint8_t>()[row * cols + col]);
}

}  // namespace maga
