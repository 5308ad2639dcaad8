// A norm's weight or a bias: fp32, as the kernels read it.
#pragma once

#include "backends/backend.h"

namespace maga::cpu {

class VectorWeight : public Weight {
 public:
  explicit VectorWeight(std::vector<float> values) : values_(std::move(values)) {}
  int64_t bytes() const override { return size() * static_cast<int64_t>(sizeof(float)); }
  int64_t size() const { return static_cast<int64_t>(values_.size()); }
  const float* data() const { return values_.data(); }

 private:
  std::vector<float> values_;
};

// Throws Error naming `spec` when it is not a vector of floating-point numbers.
std::shared_ptr<const VectorWeight> pack_vector(const WeightSpec& spec, const Canonical& weight);

}  // namespace maga::cpu
