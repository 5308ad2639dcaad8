// Random matrices and activations for the check and the timing of the CPU's matrix kernels.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "backends/cpu/linear.h"
#include "core/rng.h"

namespace maga::bench {

struct Random {
  uint64_t stream = 0, index = 0;
  double uniform() { return maga::uniform(1, stream, index++); }
  double between(double low, double high) { return low + (high - low) * uniform(); }
  int64_t below(int64_t n) { return static_cast<int64_t>(uniform() * static_cast<double>(n)); }
};

// What a weight is made of. `bits` 0: dense of `dtype`. `group` 0: the whole row.
struct WeightCase {
  std::string name;
  DType dtype = DType::f32;
  int bits = 0;
  int64_t group = 0;
  int zero = 0;
  bool offset = false;
  bool half_scales = true;
};

template <typename T>
Tensor make_tensor(DType dtype, std::vector<int64_t> shape, std::vector<T> values) {
  auto owner = std::make_shared<std::vector<T>>(std::move(values));
  return {reinterpret_cast<const std::byte*>(owner->data()), dtype, std::move(shape), owner};
}

inline Canonical make_weight(const WeightCase& c, int64_t rows, int64_t cols, Random& random) {
  if (c.bits == 0) {
    std::vector<float> values(static_cast<size_t>(rows * cols));
    for (float& v : values) v = static_cast<float>(random.between(-1, 1));
    if (c.dtype == DType::f32) return Dense{make_tensor(DType::f32, {rows, cols}, std::move(values))};
    std::vector<uint16_t> halves;
    for (const float v : values) halves.push_back(c.dtype == DType::f16 ? float_to_f16(v) : float_to_bf16(v));
    return Dense{make_tensor(c.dtype, {rows, cols}, std::move(halves))};
  }
  const int64_t group = c.group ? c.group : cols, groups = cols / group;
  std::vector<uint8_t> codes(static_cast<size_t>(rows * cols));
  for (auto& code : codes) code = static_cast<uint8_t>(random.below(int64_t{1} << c.bits));
  const auto floats = [&](double low, double high) {
    std::vector<float> values(static_cast<size_t>(rows * groups));
    for (float& v : values) {
      v = static_cast<float>(random.between(low, high));
      if (c.half_scales) v = f16_to_float(float_to_f16(v));
    }
    return make_tensor(DType::f32, {rows, groups}, std::move(values));
  };
  Affine w;
  w.codes = make_tensor(DType::u8, {rows, cols}, std::move(codes));
  w.bits = c.bits;
  w.group = group;
  w.scale = floats(0.01, 0.1);
  w.zero = c.zero;
  if (c.offset) w.offset = floats(-0.5, 0.5);
  return w;
}

// Returns whether every kernel agrees with the plain loops; prints what does not. `only`: for weights whose name contains it.
bool check_linear(cpu::Isa isa, const std::string& only);

}  // namespace maga::bench
