// Tiled linears for more than 64 tokens on Hopper, of bf16 and fp16, or of e4m3 weights and tokens: which kernel a call gets, and
// its launch.
//
// Tokens are the 64-row side of wgmma, weights its wide side. CTAs work in pairs (clusters of two) on neighbouring tiles that share
// either their weights or their tokens: each brings half of what is shared, for both. A pair takes tiles until none is left. Where
// too few tiles would leave SMs idle, k is split, and the next kernel adds up the parts.
#pragma once

#include <cuda.h>

#include <vector>

#include "backends/cuda/linear.h"

namespace maga::cuda {

struct TileShape {
  int m = 0;
  int rows = 0;  // of the weight; gated: 2 n
  int k = 0;
  bool gated = false, may_split = false;
  int sms = 0;
  bool fp8 = false;  // both operands are e4m3
};

// What is compiled, for each type that has_tile.
struct Tile {
  int groups;  // warpgroups, 64 tokens each
  int rows;    // of the weight; at most 256, in steps of 32
};
constexpr Tile kTiles[] = {{2, 96}, {2, 128}, {2, 160}, {2, 192}, {2, 224}, {2, 256}, {3, 128}, {3, 192}};

struct TileConfig {
  Tile tile;
  bool share_weights;  // the tiles of a pair: the same weights and neighbouring tokens, else the other way round
  int split;           // of k
};

// E4m3 linears' kernels hold every sum twice; 128 x 192, which just fits, is hardly ever the fastest.
constexpr bool has_tile(const Tile& tile, bool fp8) { return fp8 ? tile.rows <= 160 : tile.rows != 160; }

constexpr int kTileMostShared = 232448;  // bytes a CTA may have
constexpr int kTileStaging = 2048;       // bytes a warp, for results on their way out
constexpr int kTileBarriers = 128;       // bytes, 16 a stage
constexpr int kTileMostStages = kTileBarriers / 16;

constexpr int tile_step_bytes(const Tile& tile) { return (64 * tile.groups + tile.rows) * 128; }
constexpr int tile_fixed_bytes(const Tile& tile) {
  constexpr int kToAlign = 1024;
  return kToAlign + tile.groups * 4 * kTileStaging + kTileBarriers;
}
constexpr int tile_stages(const Tile& tile) {
  const int fit = (kTileMostShared - tile_fixed_bytes(tile)) / tile_step_bytes(tile);
  return fit < kTileMostStages ? fit : kTileMostStages;
}
constexpr int tile_shared_bytes(const Tile& tile) { return tile_fixed_bytes(tile) + tile_stages(tile) * tile_step_bytes(tile); }

constexpr int kMostSplitTokens = 256;  // above, k is not split

// The one expected to be fastest.
TileConfig choose_tiles(const TileShape& shape);
// All that make sense, the one expected to be fastest first. Results do not depend on the tile, only on the split.
std::vector<TileConfig> tile_configs(const TileShape& shape);

class Tiles {
 public:
  Tiles();
  // Whether there is a kernel for this call on this device; with args.slabs, or for slabs_of, `out` does not matter.
  bool takes(const LinearArgs& args) const;
  bool takes_slabs(const LinearArgs& args) const;
  TileShape shape_of(const LinearArgs& args) const;
  void run(const Queue& queue, const LinearArgs& args, const TileConfig& config);

 private:
  int sms_ = 0;
  bool hopper_ = false;
  std::vector<const void*> raised_;  // kernels allowed their shared memory
};

}  // namespace maga::cuda
