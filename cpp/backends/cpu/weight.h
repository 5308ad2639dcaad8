// Matrices in the layout that the CPU's matrix kernels read, the same for every instruction set.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "backends/backend.h"
#include "backends/cpu/linear_kernels.h"

namespace maga::cpu {

class PackedWeight : public Weight {
 public:
  PackedWeight(const PackedMatrix& matrix, std::shared_ptr<const std::byte> storage, int64_t bytes)
      : matrix_(matrix), storage_(std::move(storage)), bytes_(bytes) {}

  PackedWeight(const PackedWeight& of, std::string widened) : PackedWeight(of) { widened_ = std::move(widened); }

  int64_t bytes() const override { return bytes_; }
  std::string widened() const override { return widened_; }
  int64_t rows() const { return matrix_.rows; }
  int64_t cols() const { return matrix_.cols; }
  const PackedMatrix& matrix() const { return matrix_; }

 private:
  PackedMatrix matrix_;
  std::shared_ptr<const std::byte> storage_;
  int64_t bytes_;
  std::string widened_;
};

// Thread-safe. Throws Error naming `spec` when the shapes or types cannot be taken.
std::shared_ptr<const PackedWeight> pack_matrix(const WeightSpec& spec, const Canonical& weight);

// The matrices of experts.
class StackedWeight : public Weight {
 public:
  explicit StackedWeight(std::vector<std::shared_ptr<const PackedWeight>> matrices) : matrices_(std::move(matrices)) {}

  int64_t bytes() const override;
  std::string widened() const override { return matrix(0).widened(); }
  std::vector<int64_t> shape() const { return {matrices(), matrix(0).rows(), matrix(0).cols()}; }
  int64_t matrices() const { return static_cast<int64_t>(matrices_.size()); }
  const PackedWeight& matrix(int64_t i) const { return *matrices_[i]; }

 private:
  std::vector<std::shared_ptr<const PackedWeight>> matrices_;
};

class PackedStack : public WeightStack {
 public:
  using WeightStack::WeightStack;

 protected:
  void append(const WeightSpec& matrix_spec, const Canonical& matrix) override {
    matrices_.push_back(pack_matrix(matrix_spec, matrix));
  }
  std::shared_ptr<const Weight> packed() override { return std::make_shared<const StackedWeight>(std::move(matrices_)); }

 private:
  std::vector<std::shared_ptr<const PackedWeight>> matrices_;
};

// One row, dequantised as its canonical form says: scale * (code - zero) + offset, each operation rounded to fp32.
void unpack_row(const PackedWeight& weight, int64_t row, float* out);

}  // namespace maga::cpu
