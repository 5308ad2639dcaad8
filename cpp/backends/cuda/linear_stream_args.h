// What a streaming kernel is given, and how its launcher finds it.
#pragma once

#include "backends/cuda/linear_stream.h"

namespace maga::cuda {

struct StreamArgs {
  void* out;             // (m, n) of T, or f32
  float* slabs;          // or (split, m, rows) partial sums
  const void* bias;      // (rows) or null
  const void* residual;  // (m, n) or null
  int64_t out_stride, residual_stride;
  int m, rows;  // rows of the weight; gated: 2 n
  int steps;    // of the ring, over all of k
  int split, stages, window;
  bool out_f32, gated;
  ActivationKind activation;
};

using StreamKernel = void (*)(StreamArgs, CUtensorMap, CUtensorMap);

// The kernel of a tile, by its rows. Instantiated in linear_stream_<type>_<tokens>.cu.
template <typename T, int kTokens>
StreamKernel stream_kernel(int rows);

}  // namespace maga::cuda
