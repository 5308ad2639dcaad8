// A weight on the card, or a stack of them: row-major, in the backend's compute type.
#pragma once

#include <vector>

#include "backends/backend.h"
#include "backends/cuda/memory.h"

namespace maga::cuda {

class DeviceWeight : public Weight {
 public:
  DeviceWeight(std::vector<int64_t> shape, DType type, DeviceMemory memory)
      : shape_(std::move(shape)), type_(type), memory_(std::move(memory)) {}
  int64_t bytes() const override { return memory_.bytes(); }
  const std::vector<int64_t>& shape() const { return shape_; }
  DType type() const { return type_; }
  const void* data() const { return memory_.data(); }

 private:
  std::vector<int64_t> shape_;
  DType type_;
  DeviceMemory memory_;
};

}  // namespace maga::cuda
