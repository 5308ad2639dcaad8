// Which kernel for codes a shape gets: the one whose estimated time is least.
#include <algorithm>
#include <limits>

#include "backends/cuda/linear_affine.h"

namespace maga::cuda {
namespace {

constexpr int kSharedOfTwo = 114688;  // bytes a CTA may have if two share an SM
// As for dense weights, see linear_stream_choose.cpp.
constexpr int kWindowBytes = 64 << 10, kWindowBytesMany = 96 << 10;
constexpr int kManyTokens = 32;

constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }

int ring_steps(const AffineShape& shape, const AffineTile& tile) {
  return divide_up(shape.k, kUnitColumns * affine_step_units(tile, shape.layout.bits));
}

// Tokens of a tile are padded to the next size; more than the largest make several tiles.
bool fits(const AffineShape& shape, const AffineTile& tile) {
  const bool plain = affine_plain(shape.layout);
  if (!affine_compiled(tile, plain)) return false;
  int least = std::numeric_limits<int>::max();
  for (const AffineTile& each : kAffineTiles)
    if (affine_compiled(each, plain) && each.tokens >= shape.m) least = std::min(least, each.tokens);
  if (least == std::numeric_limits<int>::max()) return tile.tokens >= 128;
  return tile.tokens == least || (tile.tokens == 128 && shape.m > 128);
}

bool place(const AffineShape& shape, const AffineTile& tile, int split, bool two, AffineConfig* config) {
  const int steps = ring_steps(shape, tile), items = divide_up(shape.rows, tile.rows()) * divide_up(shape.m, tile.tokens);
  if (split > steps || (split > 1 && (!shape.may_split || items * split > 2 * shape.sms))) return false;
  if (two && (tile.tokens > 16 || tile.tiles > 1 || tile.groups > 2 || items * split <= shape.sms)) return false;
  const int rounds = divide_up(items * split, two ? 2 * shape.sms : shape.sms), ctas = divide_up(items, rounds);
  const int step = affine_step_bytes(tile, shape.layout);
  const int fit = ((two ? kSharedOfTwo : kAffineMostShared) - affine_shared_bytes(tile, shape.layout, 0)) / step;
  if (fit < 2) return false;
  const int stages = std::min({fit, kAffineMostStages, divide_up(steps, split) * divide_up(items, ctas)});
  const int per_sm = divide_up(ctas * split, shape.sms);
  const int window = divide_up(tile.tokens < kManyTokens ? kWindowBytes : kWindowBytesMany, step * per_sm);
  *config = {tile, split, ctas, stages, std::min(window, stages)};
  return true;
}

// Microseconds, but for a factor; fitted to one sweep over all configurations of Llama-3-8B's matrices, 4 bits in groups of 128, on
// one H200 (`cuda_linear_quantized sweep`, which prints what the choice costs against the best): there it is within 7 %.
double estimate(const AffineShape& shape, const AffineConfig& config) {
  constexpr double kBytesPerUs = 4.51e6;            // of the whole card
  constexpr double kOneSm = 1.24;                   // what one SM can take, in shares of its part of that
  constexpr double kCycle = 1 / 1.75e3;             // us
  constexpr double kCodeCycles = 35;                // to make numbers of 16 x 128 codes
  constexpr double kTokenBytes = 60;                // a cycle, from the L2 to an SM
  constexpr double kStartUs = 2.5, kStepUs = 0.45;  // the chain of a CTA's ring steps, where that is longer
  constexpr double kAloneUs = 1.2;                  // few tokens, one CTA an SM: the next kernel's cannot move in one by one
  constexpr double kSlabCost = 2.5;                 // of a byte of partial sums, in bytes of weight
  constexpr double kTogether = 0.3;                 // of each, even where another takes longest
  constexpr double kSplitUs = 0.002;                // between equals: fewer parts

  const auto& [tile, split, ctas, stages, window] = config;
  const int items = divide_up(shape.rows, tile.rows()) * divide_up(shape.m, tile.tokens), all = ctas * split;
  const int units = affine_step_units(tile, shape.layout.bits);
  const int per_sm = divide_up(all, shape.sms), steps = divide_up(ring_steps(shape, tile), split) * divide_up(items, ctas);
  const double blocks = 1. * per_sm * steps * units * tile.rows() / 16;  // of 16 x 128 codes, on the busiest SM
  const double bytes = blocks * 2 * affine_unit_bytes(shape.layout) * shape.sms / kOneSm;
  const double all_bytes = static_cast<double>(affine_bytes(shape.layout, shape.rows, shape.k));
  const double memory = std::max(bytes, all_bytes) / kBytesPerUs;
  const double codes = blocks * kCodeCycles * kCycle;
  const double multiply = blocks / 4 * 8 * std::max(16., tile.tokens / 2.) * 1.1 * kCycle;
  const double tokens = 1. * per_sm * steps * units * 256 * tile.tokens / kTokenBytes * kCycle;
  const double slabs = split > 1 ? kSlabCost * 4. * split * shape.m * shape.rows / kBytesPerUs : 0;
  return std::max({memory, codes, multiply, tokens, steps * kStepUs}) + kTogether * (memory + codes + multiply + tokens) +
         kStartUs + slabs + (per_sm == 1 && tile.tokens <= 16 ? kAloneUs : 0) + kSplitUs * split;
}

template <typename Visit>
void each_config(const AffineShape& shape, Visit&& visit) {
  for (const AffineTile& tile : kAffineTiles)
    if (fits(shape, tile))
      for (const int split : {1, 2, 3, 4, 5, 6, 8})
        for (const bool two : {false, true})
          if (AffineConfig config; place(shape, tile, split, two, &config)) visit(config);
}

}  // namespace

AffineConfig choose_affine(const AffineShape& shape) {
  AffineConfig best{};
  double least = std::numeric_limits<double>::infinity();
  each_config(shape, [&](const AffineConfig& config) {
    const double us = estimate(shape, config);
    if (us < least) least = us, best = config;
  });
  return best;
}

std::vector<AffineConfig> affine_configs(const AffineShape& shape) {
  std::vector<AffineConfig> all;
  each_config(shape, [&](const AffineConfig& config) { all.push_back(config); });
  return all;
}

}  // namespace maga::cuda
