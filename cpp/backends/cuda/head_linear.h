// HeadLinear of program/ops.h: a matrix product of its own for every head.
#pragma once

#include "backends/cuda/rows.h"

namespace maga::cuda {

struct HeadLinearArgs {
  Matrix in;                     // (tokens, heads * (k + rest)) of the compute type
  Matrix out;                    // (tokens, heads * (n + rest))
  const void* weight = nullptr;  // (heads, n, k)
  int tokens = 0, heads = 0, n = 0, k = 0, rest = 0;
};
void head_linear(const Queue& queue, DType type, const HeadLinearArgs& args);

}  // namespace maga::cuda
