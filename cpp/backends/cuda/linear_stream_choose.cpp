// Which streaming kernel a shape gets: the one whose estimated time is least, but for a few small matrices that were measured. The
// estimate was fitted to one sweep over all configurations of 15 matrices on one H200 (`cuda_linear sweep`, which prints what the
// choice costs against the best): on that same data it is within 3 % for the matrices of Llama-3-8B. Times of kernels under 5 us
// differ by 10 to 25 % from run to run, so a difference of a few percent there means nothing. Linears of e4m3 weights have the same
// steps in bytes, half as many.
#include <algorithm>
#include <limits>
#include <utility>

#include "backends/cuda/linear_stream.h"

namespace maga::cuda {
namespace {

constexpr int kSharedOfTwo = 114688;  // bytes a CTA may have if two share an SM

// The ring is deep to outlast waits, but a memory system with a whole ring of requests from every SM makes each small load of the
// step (tokens, norms) wait behind them. This much under way on an SM suffices; more where tokens are a good part of the stream.
constexpr int kWindowBytes = 64 << 10, kWindowBytesMany = 96 << 10;
constexpr int kManyTokens = 32;

// Matrices of Llama-3.2-1B and SmolLM-135M so small, or so short, that what counts is how long a CTA takes to start and to finish,
// which the estimate does not know. In that sweep: 1.03 to 1.36 times as fast as the estimate's choice.
struct Measured {
  int rows, k, tokens, tile, split;
};
constexpr Measured kMeasured[] = {
    {3072, 2048, 16, 128, 8}, {2048, 2048, 8, 64, 5},  {2048, 2048, 16, 96, 6}, {2048, 2048, 32, 96, 6}, {2048, 2048, 64, 128, 4},
    {960, 576, 8, 48, 5},     {960, 576, 16, 48, 5},   {960, 576, 32, 64, 5},   {960, 576, 64, 64, 5},   {576, 576, 32, 48, 5},
    {3072, 576, 32, 64, 1},   {576, 1536, 8, 48, 6},   {576, 1536, 16, 48, 6},  {576, 1536, 32, 64, 6},  {576, 1536, 64, 64, 6},
    {49152, 576, 16, 64, 1},  {49152, 576, 32, 64, 1}, {49152, 576, 64, 128, 1}};

constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }

int padded_tokens(int m) { return m <= 8 ? 8 : m <= 16 ? 16 : m <= 32 ? 32 : 64; }
int ring_steps(const StreamShape& shape, const StreamTile& tile) { return divide_up(shape.k, (shape.fp8 ? 128 : 64) * tile.boxes); }

// Whether two CTAs find room for their registers.
bool two_fit(const StreamShape& shape, const StreamTile& tile, int tokens) {
  if (shape.fp8) return stream_fp8_ctas(tile, tokens) == 2;
  return tokens < 64 || tile.rows <= 128;
}

enum class Placement { small_ring, large_ring, two_an_sm };
constexpr Placement kPlacements[] = {Placement::small_ring, Placement::large_ring, Placement::two_an_sm};

// False if the tile cannot be placed so.
bool place(const StreamShape& shape, const StreamTile& tile, int split, Placement placement, StreamConfig* config) {
  const int tokens = padded_tokens(shape.m), tiles = divide_up(shape.rows, tile.rows), steps = ring_steps(shape, tile);
  const int slots = placement == Placement::two_an_sm ? 2 * shape.sms : shape.sms;
  if (split > steps) return false;
  if (split > 1 && (!shape.may_split || tiles * split > 2 * shape.sms)) return false;
  if (shape.fp8 && !stream_has_fp8(tile, tokens)) return false;
  if (placement == Placement::two_an_sm && (!two_fit(shape, tile, tokens) || tiles * split <= shape.sms)) return false;
  const int rounds = divide_up(tiles * split, slots), ctas = divide_up(tiles, rounds);
  const int per_sm = divide_up(ctas * split, shape.sms);
  const int step = stream_step_bytes(tile, tokens) + stream_scale_bytes(tile, tokens, shape.fp8);
  const int shared = placement == Placement::large_ring ? kStreamMostShared : kSharedOfTwo;
  const int fit = (shared - stream_shared_bytes(tile, tokens, 0, shape.fp8)) / step;
  const int stages = std::min({fit, kMostStages, divide_up(steps, split) * divide_up(tiles, ctas)});
  if (fit < 2) return false;
  // A warp that rounds tokens must not come back to a slot two uses later: it could not tell them apart.
  if (shape.fp8 && stream_rounds(tokens) && fit * tile.boxes < kRoundingWarps) return false;
  const int window = divide_up(tokens < kManyTokens ? kWindowBytes : kWindowBytesMany, step * per_sm);
  *config = {tile, tokens, split, ctas, stages, std::min(window, stages)};
  return true;
}

// Microseconds, but for a factor and a sum that all configurations of a shape share.
double estimate(const StreamShape& shape, const StreamConfig& config) {
  constexpr double kBytesPerUs = 4.51e6;                   // of the whole card
  constexpr double kOneSm = 1.24;                          // what one SM can take, in shares of that, with a ring without end,
  constexpr double kRingBytes = 60 << 10;                  // and the ring that halves it
  constexpr double kTokenCost = 0.07;                      // of a byte of tokens, out of the L2, in bytes of weight
  constexpr double kSlabCost = 4.3;                        // of a byte of partial sums, likewise
  constexpr double kStepUs = 0.31, kStartUs = 3.6;         // the chain of a CTA's ring steps, where that is longer than the stream
  constexpr double kAloneUs = 3.2;                         // one CTA an SM: the next kernel's cannot move in one by one
  constexpr double kSplitUs = 0.002, kTokenUs = 0.000038;  // between equals: fewer parts, fewer copies of the tokens

  const auto& [tile, tokens, split, ctas, stages, window] = config;
  const int all = ctas * split, per_sm = divide_up(all, shape.sms);
  const int steps = divide_up(ring_steps(shape, tile), split) * divide_up(divide_up(shape.rows, tile.rows), ctas);
  const double step_bytes = 128. * tile.boxes * tile.rows;
  const double cta_bytes = steps * step_bytes * (1 + kTokenCost * tokens / tile.rows);
  const double ring = (stages - 0.5) * step_bytes * per_sm;
  const double one_sm = kBytesPerUs / shape.sms * kOneSm * ring / (ring + kRingBytes);
  // A step's tokens to e4m3, as measured on the 8B's matrices; CTAs of one SM slow each other.
  const double round_us = tile.boxes * (0.02 + 0.0225 * tokens) * (per_sm > 1 ? 1.4 : 1);
  // The sums of each box are added up by themselves, which no product overlaps.
  const double box_us = tile.boxes * (0.1 + 0.0035 * tokens);
  const double step_us = !shape.fp8 ? kStepUs : std::max(kStepUs, stream_rounds(tokens) ? round_us : box_us);
  const double slab_bytes = split > 1 ? 4. * split * shape.m * shape.rows : 0;
  return std::max({cta_bytes * all / kBytesPerUs, cta_bytes * per_sm / one_sm, steps * step_us + kStartUs}) +
         kSlabCost * slab_bytes / kBytesPerUs + (per_sm == 1 ? kAloneUs : 0) + kSplitUs * split +
         kTokenUs * tokens * all / shape.sms;
}

template <typename Visit>
void each_config(const StreamShape& shape, Visit&& visit) {
  for (const StreamTile& tile : kStreamTiles)
    for (const int split : {1, 2, 3, 4, 5, 6, 8})
      for (const Placement placement : kPlacements)
        if (StreamConfig config; place(shape, tile, split, placement, &config)) visit(config);
}

}  // namespace

StreamConfig choose_stream(const StreamShape& shape) {
  const int tokens = padded_tokens(shape.m);
  auto measured = [&](const StreamConfig& config) {
    return std::ranges::any_of(kMeasured, [&](const Measured& m) {
      return !shape.fp8 && m.rows == shape.rows && m.k == shape.k && m.tokens == tokens && m.tile == config.tile.rows &&
             m.split == config.split;
    });
  };
  StreamConfig best{};
  std::pair least(true, std::numeric_limits<double>::infinity());  // measured ones come first
  each_config(shape, [&](const StreamConfig& config) {
    const std::pair cost(!measured(config), estimate(shape, config));
    if (cost < least) least = cost, best = config;
  });
  return best;
}

std::vector<StreamConfig> stream_configs(const StreamShape& shape) {
  std::vector<StreamConfig> all;
  each_config(shape, [&](const StreamConfig& config) { all.push_back(config); });
  return all;
}

}  // namespace maga::cuda
