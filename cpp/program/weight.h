// Canonical weights: what the loader hands to a backend, whatever format the checkpoint had. Host memory, exact.
#pragma once

#include <variant>

#include "core/tensor.h"
#include "program/program.h"

namespace maga {

// Values as they are: fp32, fp16 or bf16. (rows, cols) for a matrix, (n) for a vector.
struct Dense {
  Tensor values;
};

// values[r, c] = scale[r, c / group] * (codes[r, c] - zero) + offset[r, c / group]
struct Affine {
  Tensor codes;       // (rows, cols) u8, each below 2^bits
  int bits = 0;       // 1 to 8
  int64_t group = 0;  // columns that share a scale; divides cols
  Tensor scale;       // (rows, cols / group) fp32
  Tensor offset;      // the same shape, fp32; empty: none
  int zero = 0;       // one for the whole tensor: 8 for a symmetric 4-bit code, 128 for int8 stored as u8
};

// values[r, c] = scale[r / high, c / wide] * codes[r, c], the codes being float8 e4m3 without infinities.
struct Float8 {
  Tensor codes;                // (rows, cols) u8
  int64_t high = 0, wide = 0;  // rows and columns that share a scale; the last block of either may be part empty
  Tensor scale;                // (blocks of rows, blocks of columns) fp32
};

using Canonical = std::variant<Dense, Affine, Float8>;

// Throws Error naming `spec` unless the parts fit together and have the shape that it states.
void check(const WeightSpec& spec, const Float8& weight);
// Element (row, col); the product is rounded once.
float value_at(const Float8& weight, int64_t row, int64_t col);

}  // namespace maga
