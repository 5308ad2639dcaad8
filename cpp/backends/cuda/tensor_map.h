// Tensor maps: how the copy engine of Hopper finds boxes of a matrix.
#pragma once

#include <cuda.h>

#include "core/dtype.h"

namespace maga::cuda {

struct TensorShape {
  cuuint32_t rank = 0;
  cuuint64_t sizes[5] = {};    // elements, innermost first
  cuuint64_t strides[4] = {};  // elements, of all but the innermost
  cuuint32_t box[5] = {};      // elements
};

// Of f16 or bf16, for boxes of 64 columns in the 128-byte swizzle; what lies outside reads as zeros.
CUtensorMap tensor_map(DType type, const void* data, const TensorShape& shape);
// Of words of 8 bytes, for boxes of any size.
CUtensorMap word_map(const void* data, const TensorShape& shape);

}  // namespace maga::cuda
