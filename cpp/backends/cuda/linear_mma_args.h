// What the kernel of linear_mma.h is given, and how its launcher finds it.
#pragma once

#include "backends/cuda/linear_mma.h"
#include "backends/cuda/moe_tiles.cuh"

namespace maga::cuda {

constexpr int kMmaThreads = 32 * kMmaWarps;
constexpr int kMmaTables = (sizeof(MoeTiles) + 127) / 128 * 128;  // before the ring, of experts

struct MmaArgs {
  const uint8_t* weight;  // units
  const void* x;          // (m, k)
  void* out;              // (m, n) of T, or f32
  float* slabs;           // or (split, m, rows) partial sums
  const void* bias;       // (rows) or null; of experts, (experts * rows)
  const void* residual;   // (m, n) or null
  int64_t x_stride, out_stride, residual_stride;
  const int32_t* counts;  // of experts, the tokens of each, which lie sorted by expert; null: one weight for all
  int experts;
  int m, rows, k;  // rows of a weight; gated: 2 n
  int across;      // units along k
  int steps;       // of the ring, over all of k
  int split, stages, deep;
  int row_tiles, token_tiles;
  int sets, unit_bytes, step_bytes;
  AffineShift shift;
  bool x_aligned;  // rows of tokens start at 16-byte pieces
  bool out_f32, gated;
  bool first;  // of an expert's two linears
  Gating gating;
};

using MmaKernel = void (*)(MmaArgs);

// Instantiated in linear_mma_<type>_<kind>.cu. kCode: as in linear_affine_codes.cuh.
template <typename T, int kCode, bool kPlain>
MmaKernel mma_kernel(const MmaTile& tile);

}  // namespace maga::cuda
