// What a tiled kernel is given, and how its launcher finds it.
#pragma once

#include "backends/cuda/linear_quantize.h"
#include "backends/cuda/linear_tiles.h"

namespace maga::cuda {

constexpr int kScaleSteps = kScaleColumns / 128;  // steps of e4m3 tokens that share a scale

struct TileArgs {
  void* out;             // (m, n) of T, or f32
  float* slabs;          // or (split, m, rows) partial sums
  const void* bias;      // (rows) or null
  const void* residual;  // (m, n) or null
  int64_t out_stride, residual_stride;
  int m, rows;  // rows of the weight; gated: 2 n
  int steps;    // of 128 bytes of columns, over all of k
  int split;
  // A unit is what a pair of CTAs covers in one direction: one tile where it is shared, else two.
  int token_units, row_units;
  int band;                // token units that are walked together, so that their tokens and the weights under way stay in the L2
  uint64_t weight_policy;  // of the L2
  bool share_weights, out_f32, gated;
  ActivationKind activation;
  // Of e4m3 linears.
  const float* x_scale;  // (runs of kScaleSteps steps, x_scale_stride)
  int x_scale_stride;
  const float* weight_scale;  // (rows)
};

using TileKernel = void (*)(TileArgs, CUtensorMap, CUtensorMap);

// The kernel of a tile, by its rows; E: of the operands, T: of results. Instantiated in linear_tiles_<type>_<tokens>.cu and
// linear_tiles_fp8_<type>.cu.
template <typename E, typename T, int kGroups>
TileKernel tile_kernel(int rows);

}  // namespace maga::cuda
