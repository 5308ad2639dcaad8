// Which streaming kernel a shape gets: the one whose estimated time is least. The estimate is a handful of terms that were fitted
// to measurements on an H200 (benchmarks/cuda_linear.cu prints what the choice costs against the best of all configurations).
#include <algorithm>
#include <limits>

#include "backends/cuda/linear_stream.h"

namespace maga::cuda {
namespace {

constexpr int kSharedOfTwo = 114688;  // bytes a CTA may have if two share an SM

// The ring is deep to outlast waits, but a memory system with a whole ring of requests from every SM makes each small load of the
// step (tokens, norms) wait behind them. This much under way on an SM suffices for full bandwidth. Where the tokens are a good
// part of the stream the ring may fill.
constexpr int kWindowBytes = 64 << 10;
constexpr int kWindowTokens = 16;

constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }

int padded_tokens(int m) { return m <= 8 ? 8 : m <= 16 ? 16 : m <= 32 ? 32 : 64; }
int ring_steps(const StreamShape& shape, const StreamTile& tile) { return divide_up(shape.k, 64 * tile.boxes); }

enum class Placement { small_ring, large_ring, two_an_sm };

// False if the tile cannot be placed so.
bool place(const StreamShape& shape, const StreamTile& tile, int split, Placement placement, StreamConfig* config) {
  const int tokens = padded_tokens(shape.m), tiles = divide_up(shape.rows, tile.rows), steps = ring_steps(shape, tile);
  const int slots = placement == Placement::two_an_sm ? 2 * shape.sms : shape.sms;
  if (split > steps) return false;
  const bool two_fit = tokens < 64 || tile.rows <= 128;  // else they need more registers than an SM has
  if (placement == Placement::two_an_sm && (!two_fit || tiles * split <= shape.sms)) return false;
  const int rounds = divide_up(tiles * split, slots), ctas = divide_up(tiles, rounds);
  const int per_sm = divide_up(ctas * split, shape.sms);
  const int step = stream_step_bytes(tile, tokens), shared = placement == Placement::large_ring ? kStreamMostShared : kSharedOfTwo;
  const int fit = (shared - stream_shared_bytes(tile, tokens, 0)) / step;
  const int stages = std::min({fit, kMostStages, divide_up(steps, split) * divide_up(tiles, ctas)});
  if (fit < 2) return false;
  const int window = tokens <= kWindowTokens ? divide_up(kWindowBytes, step * per_sm) : stages;
  *config = {tile, tokens, split, ctas, stages, std::clamp(window, 1, stages)};
  return true;
}

// Microseconds, but for a factor that all configurations of a shape share.
double estimate(const StreamShape& shape, const StreamConfig& config) {
  constexpr double kBytesPerUs = 4.51e6;    // of the whole card
  constexpr double kTokenCost = 0.22;       // of a byte of tokens, out of the L2, in bytes of weight
  constexpr double kSlabCost = 1.0;         // of a byte of partial sums, written and read
  constexpr double kOneSm = 1.25;           // what one SM can take above its share of the bandwidth
  constexpr double kAloneUs = 0.3;          // a kernel of one CTA an SM: the next kernel's cannot move in one by one
  constexpr double kSliceBytes = 32 << 10;  // a CTA's share below which its start shows
  constexpr double kSliceUs = 0.3;

  const auto& [tile, tokens, split, ctas, stages, window] = config;
  const double row_bytes = 128. * tile.boxes * divide_up(ring_steps(shape, tile), split);
  const int rounds = divide_up(divide_up(shape.rows, tile.rows), ctas), per_sm = divide_up(ctas * split, shape.sms);
  const double cta_bytes = row_bytes * (tile.rows + kTokenCost * tokens) * rounds;
  const double shared_out = cta_bytes * ctas * split / kBytesPerUs;
  const double busiest_sm = cta_bytes * per_sm / (kBytesPerUs / shape.sms * kOneSm);
  const double slabs = split > 1 ? kSlabCost * 4. * split * shape.m * shape.rows / kBytesPerUs : 0;
  const double slice = row_bytes * tile.rows * rounds;
  return std::max(shared_out, busiest_sm) + slabs + (per_sm == 1 ? kAloneUs : 0) +
         (slice < kSliceBytes ? kSliceUs * (kSliceBytes / slice - 1) : 0);
}

template <typename Visit>
void each_config(const StreamShape& shape, Visit&& visit) {
  for (const StreamTile& tile : kStreamTiles)
    for (int split : {1, 2, 3, 4, 5, 6, 8})
      for (const Placement placement : {Placement::small_ring, Placement::large_ring, Placement::two_an_sm}) {
        if (split > 1 && (!shape.may_split || divide_up(shape.rows, tile.rows) * split > 2 * shape.sms)) continue;
        StreamConfig config;
        if (place(shape, tile, split, placement, &config)) visit(config);
      }
}

}  // namespace

StreamConfig choose_stream(const StreamShape& shape) {
  StreamConfig best{};
  double least = std::numeric_limits<double>::infinity();
  each_config(shape, [&](const StreamConfig& config) {
    if (const double us = estimate(shape, config); us < least) least = us, best = config;
  });
  return best;
}

std::vector<StreamConfig> stream_configs(const StreamShape& shape) {
  std::vector<StreamConfig> all;
  each_config(shape, [&](const StreamConfig& config) { all.push_back(config); });
  return all;
}

}  // namespace maga::cuda
