// Matrices in the layout that the CPU's matrix kernels read, the same for every instruction set.
#pragma once

#include <memory>

#include "backends/backend.h"
#include "backends/cpu/linear_kernels.h"

namespace maga::cpu {

class PackedWeight : public Weight {
 public:
  PackedWeight(const PackedMatrix& matrix, std::shared_ptr<const std::byte> storage, int64_t bytes)
      : matrix_(matrix), storage_(std::move(storage)), bytes_(bytes) {}

  int64_t bytes() const override { return bytes_; }
  int64_t rows() const { return matrix_.rows; }
  int64_t cols() const { return matrix_.cols; }
  const PackedMatrix& matrix() const { return matrix_; }

 private:
  PackedMatrix matrix_;
  std::shared_ptr<const std::byte> storage_;
  int64_t bytes_;
};

// Thread-safe. Throws Error naming `spec` when the shapes or types cannot be taken.
std::shared_ptr<const PackedWeight> pack_matrix(const WeightSpec& spec, const Canonical& weight);

// One row, dequantised as its canonical form says: scale * (code - zero) + offset, each operation rounded to fp32.
void unpack_row(const PackedWeight& weight, int64_t row, float* out);

}  // namespace maga::cpu
