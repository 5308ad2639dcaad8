// Which configuration of linear_mma a shape gets: the one whose estimated time is least.
#include <algorithm>
#include <cmath>
#include <limits>

#include "backends/cuda/linear_mma.h"

namespace maga::cuda {
namespace {

constexpr int kWindowBytes = 96 << 10;  // under way, an SM: what hides the memory's latency on the fastest of them
constexpr int kPairStages = 3;          // at least, where two CTAs share an SM

constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }

int ring_steps(const MmaShape& shape, const MmaTile& tile, int deep) {
  return divide_up(shape.k, kUnitColumns * deep * mma_step_units(tile.tokens, shape.layout.bits));
}

// Tokens of a tile are padded to the next size; more than the largest make several tiles.
bool fits(const MmaShape& shape, const MmaTile& tile) {
  const bool plain = affine_plain(shape.layout);
  const int bits = shape.layout.bits;
  if (!mma_compiled(tile, bits, plain)) return false;
  for (const MmaTile& each : kMmaTiles)
    if (mma_compiled(each, bits, plain) && each.tokens >= shape.m) return each == tile;
  return tile == *std::rbegin(kMmaTiles);
}

double items_of(const MmaShape& shape, const MmaTile& tile, int deep) {
  return shape.matrices * divide_up(shape.rows, mma_rows(tile, deep)) * divide_up(shape.m, tile.tokens);
}

bool place(const MmaShape& shape, const MmaCard& card, const MmaTile& tile, int deep, int split, bool two, MmaConfig* config) {
  if (deep > 1 && tile.tiles > 1) return false;
  const int steps = ring_steps(shape, tile, deep);
  const double items = items_of(shape, tile, deep);
  if (split > steps || (split > 1 && (!shape.may_split || items * split > 2 * card.sms))) return false;
  if (two && (tile.tokens > 32 || items * split <= card.sms)) return false;
  const int rounds = static_cast<int>(std::ceil(items * split / (two ? 2 * card.sms : card.sms)));
  const int ctas = static_cast<int>(std::ceil(items / rounds));
  const int step = mma_step_bytes(tile, shape.layout, deep);
  const int fit = ((two ? card.shared_of_two : card.shared) - mma_sums_bytes(tile, deep)) / step;
  if (fit < (two ? kPairStages : 2)) return false;
  const int wanted = divide_up(kWindowBytes / (two ? 2 : 1), step) + 1;
  *config = {tile, deep, split, ctas, std::clamp(std::min({fit, wanted, divide_up(steps, split) * rounds + 1}), 2, kMmaMostStages)};
  return true;
}

// In bytes of weight that an SM streams, or what takes it as long.
double estimate(const MmaShape& shape, const MmaCard& card, const MmaConfig& config) {
  constexpr double kOneSm = 1.24;       // what one SM can take, in shares of its part of the bandwidth
  constexpr double kTokenByte = 0.35;   // they come from the L2
  constexpr double kStepBytes = 1500;   // of a barrier
  constexpr double kTileBytes = 12000;  // to fill the ring and to store sums
  constexpr double kSlabByte = 2.5;     // written, and read by the next kernel
  constexpr double kProduct = 0.012;    // of a row, a token and a column
  constexpr double kAlone = 1.7;        // of a step, where eight warps are all that an SM has
  const auto& [tile, deep, split, ctas, stages] = config;
  const double items = items_of(shape, tile, deep), per_sm = std::ceil(items * split / card.sms);
  const double steps = divide_up(ring_steps(shape, tile, deep), split);
  const int columns = kUnitColumns * deep * mma_step_units(tile.tokens, shape.layout.bits);
  const double token_bytes = 2. * tile.tokens * columns, weight_bytes = mma_step_bytes(tile, shape.layout, deep) - token_bytes;
  const double products = kProduct * tile.tokens * mma_rows(tile, deep) * columns;
  const double alone = ctas * split > card.sms ? 1 : kAlone;
  const double step = (std::max(weight_bytes / kOneSm + kTokenByte * token_bytes, products) + kStepBytes) * alone;
  const double all = shape.matrices * static_cast<double>(affine_bytes(shape.layout, shape.rows, shape.k)) / card.sms;
  const double slabs = split > 1 ? kSlabByte * 4 * split * shape.m * shape.rows / card.sms : 0;
  return std::max(all, per_sm * (steps * step + kTileBytes)) + slabs;
}

template <typename Visit>
void each_config(const MmaShape& shape, const MmaCard& card, Visit&& visit) {
  for (const MmaTile& tile : kMmaTiles)
    if (fits(shape, tile))
      for (const int deep : {1, 2, 4, 8})
        for (const int split : {1, 2, 3, 4, 5, 6, 8})
          for (const bool two : {false, true})
            if (MmaConfig config; place(shape, card, tile, deep, split, two, &config)) visit(config);
}

}  // namespace

MmaConfig choose_mma(const MmaShape& shape, const MmaCard& card) {
  MmaConfig best{};
  double least = std::numeric_limits<double>::infinity();
  each_config(shape, card, [&](const MmaConfig& config) {
    const double cost = estimate(shape, card, config);
    if (cost < least) least = cost, best = config;
  });
  return best;
}

std::vector<MmaConfig> mma_configs(const MmaShape& shape, const MmaCard& card) {
  std::vector<MmaConfig> all;
  each_config(shape, card, [&](const MmaConfig& config) { all.push_back(config); });
  return all;
}

}  // namespace maga::cuda
