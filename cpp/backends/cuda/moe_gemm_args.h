// What a tiled kernel of experts is given, and how its launcher finds it.
#pragma once

#include <cuda.h>

#include "backends/cuda/moe_gemm.h"

namespace maga::cuda {

struct MoeTileArgs {
  void* out;              // (slots, n) of T
  const void* bias;       // (experts * rows) or null
  const int32_t* counts;  // (experts)
  int experts;
  int rows;   // of an expert's weight: n; gated: 2 n
  int steps;  // of the ring, over all of k
  int stages;
  bool first;  // of the two linears
  bool gated;
  Gating gating;
};

// What is compiled, for each type.
struct MoeConfig {
  int slots, rows;  // of a tile
  int groups;       // warpgroups
  int boxes;        // of 64 columns, a ring step
  bool operator==(const MoeConfig&) const = default;
};
constexpr MoeConfig kMoeConfigs[] = {{8, 128, 2, 1},  {8, 64, 1, 2},   {8, 32, 1, 2},   {16, 128, 2, 1},
                                     {32, 128, 2, 1}, {64, 128, 2, 1}, {128, 256, 2, 1}};

constexpr int kMoeHeader = 1024;  // barriers, 32 bytes a stage
constexpr int kMoeMostStages = kMoeHeader / 32;

// Of a warp, for results on their way out.
constexpr int moe_staging_bytes(int slots) { return (slots < 64 ? slots : 64) * 32; }

using MoeKernel = void (*)(MoeTileArgs, CUtensorMap, CUtensorMap);

// Instantiated in moe_gemm_<type>.cu.
template <typename T>
MoeKernel moe_kernel(const MoeConfig& config);

}  // namespace maga::cuda
