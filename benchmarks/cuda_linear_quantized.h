// What the check and the timing of the CUDA linears with quantised weights share: random codes, packed.
#pragma once

#include <string>

#include "backends/cuda/linear_affine.h"
#include "cuda_linear.h"

namespace maga::bench {

struct CodeForm {
  int bits = 4;
  int group = 128;  // 0: all columns
  cuda::AffineShift shift = cuda::AffineShift::none;
  bool e4m3 = false;  // with a scale for each 128 columns of a row
  std::string name() const;
};

// Random weights of a form in device memory: rows as they come, and units.
class CodedWeight {
 public:
  explicit CodedWeight(int64_t most_elements);
  // Values of about 1 / sqrt(cols).
  void make(cudaStream_t stream, const CodeForm& form, DType type, int64_t rows, int64_t cols, uint32_t seed);
  const void* units() const { return units_.at(); }
  cuda::WeightLayout layout() const { return {cuda::WeightForm::affine, layout_}; }
  // The largest error of `dense`, (rows, cols) of `type` made of the units, against the values, in units of what rounding explains.
  float error(cudaStream_t stream, const void* dense, DType type) const;

 private:
  DeviceBuffer codes_, scale_, offset_, units_, verdict_;
  cuda::AffineLayout layout_;
  cuda::AffineRows rows_;
};

// Prints the number of cases and failures; returns the failures. `small`: few and small cases, for compute-sanitizer.
int check_quantized(cudaStream_t stream, bool small);
// The same of linear_mma.
int check_mma(cudaStream_t stream, bool small);

}  // namespace maga::bench
