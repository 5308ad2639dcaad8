// What the kernel for affine weights is given, and how its launcher finds it.
#pragma once

#include "backends/cuda/linear_affine.h"

namespace maga::cuda {

struct AffineArgs {
  void* out;             // (m, n) of T, or f32
  float* slabs;          // or (split, m, rows) partial sums
  const void* bias;      // (rows) or null
  const void* residual;  // (m, n) or null
  int64_t out_stride, residual_stride;
  int m, rows;  // rows of the weight; gated: 2 n
  int steps;    // of the ring, over all of k
  int split, stages, window;
  int token_tiles;
  int sets, unit_bytes, step_bytes;
  AffineShift shift;
  bool out_f32, gated;
  ActivationKind activation;
};

using AffineKernel = void (*)(AffineArgs, CUtensorMap, CUtensorMap);

// Instantiated in linear_affine_<type>_<bits>[_plain].cu.
template <typename T, int kBits, bool kPlain>
AffineKernel affine_kernel(const AffineTile& tile);

}  // namespace maga::cuda
