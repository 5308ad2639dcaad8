// Which tiles a shape gets: an estimate puts them in order, of which the first few are timed where time for that is (linear.cpp).
#include <algorithm>
#include <limits>
#include <utility>

#include "backends/cuda/linear_tiles.h"

namespace maga::cuda {
namespace {

constexpr int kLeastSteps = 4;  // of 64 columns, a part of k

constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }

// What pairs of CTAs take one at a time, but for the parts of k.
int units(const TileShape& shape, const TileConfig& config) {
  const int tokens = 64 * config.tile.groups, rows = config.tile.rows;
  return divide_up(shape.m, config.share_weights ? 2 * tokens : tokens) *
         divide_up(shape.rows, config.share_weights ? rows : 2 * rows);
}

// Microseconds.
double estimate(const TileShape& shape, const TileConfig& config) {
  constexpr double kProductsPerUs = 2048 * 1450;               // of one SM
  constexpr double kL2BytesPerUs = 60e3, kBytesPerUs = 4.3e6;  // of one SM out of the L2, of the card out of memory
  constexpr double kOutBytesPerUs = 40e3;                      // of one SM
  constexpr double kStartUs = 3, kTileUs = 0.7;
  constexpr double kSlabBytesPerUs = 3e6;  // what it costs the next kernel to read them

  const auto& [tile, share_weights, split] = config;
  const int tokens = 64 * tile.groups, steps = divide_up(divide_up(shape.k, 64), split);
  const int rounds = divide_up(units(shape, config) * split, shape.sms / 2);
  const double l2_bytes = 128. * (share_weights ? tokens + tile.rows / 2 : tokens / 2 + tile.rows);
  const double step_us = std::max(64. * tokens * tile.rows / kProductsPerUs, l2_bytes / kL2BytesPerUs);
  const double out_us = tokens * tile.rows * (split > 1 ? 4 : 2) / kOutBytesPerUs + kTileUs;
  const double weight_bytes = 2. * shape.rows * shape.k;
  const double slab_bytes = split > 1 ? 4. * split * shape.m * shape.rows : 0;
  return kStartUs + std::max(rounds * (steps * step_us + out_us), weight_bytes / kBytesPerUs) + slab_bytes / kSlabBytesPerUs;
}

template <typename Visit>
void each_config(const TileShape& shape, Visit&& visit) {
  TileShape padded = shape;
  padded.m = divide_up(shape.m, 64) * 64;
  for (const Tile& tile : kTiles)
    for (const bool share_weights : {true, false}) {
      if (share_weights && padded.m <= 64 * tile.groups) continue;
      for (const int split : {1, 2, 3, 4, 5, 6, 8}) {
        const TileConfig config{tile, share_weights, split};
        // Parts are for tiles that would leave SMs idle: never more than one for each pair of SMs.
        if (split > 1 && (!shape.may_split || split * kLeastSteps > shape.k / 64 || units(padded, config) * split > shape.sms / 2))
          continue;
        visit(estimate(padded, config), config);
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
