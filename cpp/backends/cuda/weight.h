// A weight on the card, or a stack of them.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "backends/backend.h"
#include "backends/cuda/memory.h"

namespace maga::cuda {

enum class WeightForm : uint8_t {
  dense,   // row-major, in the backend's compute type
  affine,  // codes in units with their scales, see linear_affine.h
  fp8,     // e4m3 codes, row-major, and behind them an fp32 scale for each row; whole 16-byte pieces a row
};

inline const float* fp8_scales(const void* weight, int64_t rows, int64_t columns) {
  return reinterpret_cast<const float*>(static_cast<const std::byte*>(weight) + rows * columns);
}

// value = (code - middle) * scale + offset, with 8 or 128 for the middle, where a row of a unit has `sets` scales.
// zeros: at 4 bits, each scale has a middle of its own. offsets: each scale has an offset. Else there are neither.
enum class AffineShift : uint8_t { none, zeros, offsets };
struct AffineLayout {
  int bits = 0;  // 4 or 8
  int sets = 0;  // 1, 2 or 4
  AffineShift shift = AffineShift::none;
  auto operator<=>(const AffineLayout&) const = default;
};

// What kernels are told about a weight.
struct WeightLayout {
  WeightForm form = WeightForm::dense;
  AffineLayout affine;  // of that form
  auto operator<=>(const WeightLayout&) const = default;
};

class DeviceWeight : public Weight {
 public:
  // `type`: of the values that kernels make of it. `widened`: why codes were made dense; empty: they were not.
  DeviceWeight(std::vector<int64_t> shape, DType type, const WeightLayout& layout, DeviceMemory memory, std::string widened)
      : shape_(std::move(shape)), type_(type), layout_(layout), memory_(std::move(memory)), widened_(std::move(widened)) {}
  int64_t bytes() const override { return memory_.bytes(); }
  std::string widened() const override { return widened_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  DType type() const { return type_; }
  const WeightLayout& layout() const { return layout_; }
  const void* data() const { return memory_.data(); }

 private:
  std::vector<int64_t> shape_;
  DType type_;
  WeightLayout layout_;
  DeviceMemory memory_;
  std::string widened_;
};

}  // namespace maga::cuda
