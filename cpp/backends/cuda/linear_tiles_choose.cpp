// Which tiles a shape gets: an estimate puts them in order, of which the first few are timed where there is time for that
// (linear.cpp). It was fitted to the four linears of a Llama-3-8B layer at 80 to 8,192 tokens on one H200 (`cuda_linear tiles`),
// the norm behind included where a norm adds up the parts. On that same data the choice is within 4 % of the best tile but for some
// at 192 and 320 tokens, 7 to 18 % there, and mostly the best is among the first four. A step of e4m3 operands has twice the
// columns and takes the same time.
#include <algorithm>
#include <limits>
#include <utility>

#include "backends/cuda/linear_tiles.h"

namespace maga::cuda {
namespace {

constexpr int kLeastSteps = 16;  // a part of k

constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }
int steps_of(const TileShape& shape) { return divide_up(shape.k, shape.fp8 ? 128 : 64); }

// What pairs of CTAs take one at a time, but for the parts of k.
int units(const TileShape& shape, const TileConfig& config) {
  const int tokens = 64 * config.tile.groups, rows = config.tile.rows;
  return divide_up(shape.m, config.share_weights ? 2 * tokens : tokens) *
         divide_up(shape.rows, config.share_weights ? rows : 2 * rows);
}

// Microseconds.
double estimate(const TileShape& shape, const TileConfig& config) {
  constexpr double kProductsPerUs = 3.2e6;                              // of one SM
  constexpr double kTokenBytesPerUs = 102e3, kWeightBytesPerUs = 54e3;  // of one SM, from the L2 and from memory by way of it
  constexpr double kBytesPerUs = 4e6;                                   // of the card, from memory
  constexpr double kOutBytesPerUs = 23.5e3, kTileUs = 2.25;             // of one SM: results, and what else a tile costs
  constexpr double kStepUs = 0.055;
  constexpr double kSlabBytesPerUs = 3e6;  // written here, read by the next kernel

  const auto& [tile, share_weights, split] = config;
  const int tokens = 64 * tile.groups, steps = divide_up(steps_of(shape), split);
  const int rounds = divide_up(units(shape, config) * split, shape.sms / 2);
  const double token_bytes = 128. * (share_weights ? tokens : tokens / 2);
  const double weight_bytes = 128. * (share_weights ? tile.rows / 2 : tile.rows);
  const double step_us = kStepUs + std::max(64. * tokens * tile.rows / kProductsPerUs,
                                            token_bytes / kTokenBytesPerUs + weight_bytes / kWeightBytesPerUs);
  const double out_us = kTileUs + tokens * tile.rows * (split > 1 ? 4 : shape.gated ? 1 : 2) / kOutBytesPerUs;
  const double matrix_us = (shape.fp8 ? 1. : 2.) * shape.rows * shape.k / kBytesPerUs;
  const double slab_bytes = split > 1 ? 4. * split * shape.m * shape.rows : 0;
  return std::max(rounds * (steps * step_us + out_us), matrix_us + out_us) + slab_bytes / kSlabBytesPerUs;
}

// Parts of k are for tiles that would leave SMs idle: all of them together in one round. And since the choice binds (what adds the
// parts up asks before the linear runs), they are for tiles that waste few tokens: else cuBLASLt may have a better one.
bool may_split(const TileShape& shape, const TileConfig& config) {
  const int tokens = 64 * config.tile.groups, padded = divide_up(shape.m, tokens) * tokens;
  return shape.may_split && shape.m <= kMostSplitTokens && padded * 7 <= shape.m * 8 &&
         config.split * kLeastSteps <= steps_of(shape) && units(shape, config) * config.split <= shape.sms / 2;
}

template <typename Visit>
void each_config(const TileShape& shape, Visit&& visit) {
  for (const Tile& tile : kTiles) {
    if (!has_tile(tile, shape.fp8)) continue;
    for (const bool share_weights : {true, false}) {
      if (share_weights && shape.m <= 64 * tile.groups) continue;
      for (const int split : {1, 2, 3, 4, 5, 6, 8}) {
        const TileConfig config{tile, share_weights, split};
        if (split == 1 || may_split(shape, config)) visit(estimate(shape, config), config);
      }
    }
  }
}

}  // namespace

TileConfig choose_tiles(const TileShape& shape) {
  TileConfig best{};
  double least = std::numeric_limits<double>::infinity();
  each_config(shape, [&](double us, const TileConfig& config) {
    if (us < least) least = us, best = config;
  });
  return best;
}

std::vector<TileConfig> tile_configs(const TileShape& shape) {
  std::vector<std::pair<double, TileConfig>> all;
  each_config(shape, [&](double us, const TileConfig& config) { all.emplace_back(us, config); });
  std::ranges::stable_sort(all, {}, &std::pair<double, TileConfig>::first);
  std::vector<TileConfig> configs;
  for (const auto& [us, config] : all) configs.push_back(config);
  return configs;
}

}  // namespace maga::cuda
