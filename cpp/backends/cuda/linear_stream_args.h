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
  // Of e4m3 weights: a scale for each row (gated: those of the gate, then those of up), and tokens to round, which no tensor map
  // brings, or the scales of rounded ones.
  const float* weight_scale;
  const void* x;  // (m, k) of T
  int64_t x_stride;
  int k;
  bool x_aligned;        // to 16 bytes
  const float* x_scale;  // (x_runs, quantized_scale_stride(m))
  int x_runs;            // of kScaleColumns columns
};

using StreamKernel = void (*)(StreamArgs, CUtensorMap, CUtensorMap);

// The kernel of a tile, by its rows. Instantiated in linear_stream_<type>_<tokens>.cu.
template <typename T, int kTokens>
StreamKernel stream_kernel(int rows);

// Of e4m3 weights. Instantiated in linear_stream_fp8_<type>_<tokens>.cu.
template <typename T, int kTokens>
StreamKernel stream_fp8_kernel(int rows);

}  // namespace maga::cuda
