// Which way a linear goes: a streaming kernel for few tokens, and for many a tiled one or cuBLASLt, whichever was measured to be
// faster.
#include "backends/cuda/linear.h"

#include <algorithm>
#include <map>

#include "backends/cuda/cuda_check.h"
#include "backends/cuda/linear_gemm.h"
#include "backends/cuda/linear_measure.h"
#include "backends/cuda/linear_stream.h"
#include "backends/cuda/linear_tiles.h"
#include "backends/cuda/rows.h"

namespace maga::cuda {
namespace {

constexpr int kTimedTiles = 4;  // of the tiles that a shape may have, in the order of the estimate

int slabs_of(const Streams& streams, const Tiles& tiles, const LinearArgs& args) {
  if (args.gated) return 0;
  int split = 0;
  if (streams.takes(args)) {
    StreamShape shape = streams.shape_of(args);
    shape.may_split = true;
    split = choose_stream(shape).split;
  } else if (tiles.takes_slabs(args)) {
    TileShape shape = tiles.shape_of(args);
    shape.may_split = true;
    split = choose_tiles(shape).split;
  }
  return split > 1 ? split : 0;
}

}  // namespace

int slabs_of(const LinearArgs& args) { return slabs_of(Streams(), Tiles(), args); }

int64_t most_slab_rows(int64_t tokens, int n, int k, DType type) {
  const Streams streams;
  const Tiles tiles;
  int64_t most = 0;
  for (int64_t m = 1; m <= std::min<int64_t>(tokens, kMostSplitTokens); ++m)
    most = std::max(most, m * slabs_of(streams, tiles, {.x_stride = 8, .m = static_cast<int>(m), .n = n, .k = k, .type = type}));
  return most;
}

size_t linear_scratch_bytes(int64_t tokens, int64_t widest_gated_n, DType type) {
  return kGemmWorkspaceBytes + static_cast<size_t>(tokens * 2 * widest_gated_n * size_of(type));
}

struct Linears::State {
  // What makes another way the fastest.
  struct Call {
    int n, k;
    DType type, out_type;
    bool gated, bias, residual, slabs;
    int m;
    auto operator<=>(const Call&) const = default;
    bool like(const Call& other) const {
      Call same = other;
      same.m = m;
      return *this == same;
    }
  };
  struct Way {
    bool tiled;
    TileConfig config;
  };

  Way way_of(const Queue& queue, const LinearArgs& args);
  Way measure(const Queue& queue, LinearArgs args);
  void library(const Queue& queue, const LinearArgs& args);

  Streams streams;
  Tiles tiles;
  Gemms gemms;
  Stopwatch stopwatch;
  std::map<Call, Way> ways;
};

Linears::Linears() : state_(new State) {}
Linears::~Linears() { delete state_; }

void Linears::State::library(const Queue& queue, const LinearArgs& args) {
  if (!args.gated) {
    gemms.run(queue, args, args.scratch);
    return;
  }
  LinearArgs halves = args;  // (m, 2 n): gate | up
  halves.gated = false;
  halves.n = 2 * args.n;
  halves.out = static_cast<char*>(args.scratch) + kGemmWorkspaceBytes;
  halves.out_stride = halves.n;
  gemms.run(queue, halves, args.scratch);
  activation(queue, args.type,
             {.gate = {halves.out, halves.out_stride},
              .up = {static_cast<char*>(halves.out) + args.n * size_of(args.type), halves.out_stride},
              .out = {args.out, args.out_stride},
              .rows = args.m,
              .width = args.n,
              .kind = args.activation});
}

Linears::State::Way Linears::State::measure(const Queue& queue, LinearArgs args) {
  const TileShape shape = tiles.shape_of(args);
  const TileConfig expected = choose_tiles(shape);
  // In place, a repetition would add to the result of the one before.
  const Temporary temporary(args.residual ? args.m * args.out_stride * size_of(args.out_type) : 0);
  if (args.residual) args.out = temporary.data;
  if (args.residual && !args.out) return {true, expected};
  std::vector<TileConfig> configs = tile_configs(shape);
  std::erase_if(configs, [&](const TileConfig& config) { return config.split != expected.split; });
  configs.resize(std::min<size_t>(configs.size(), kTimedTiles));
  const size_t count = configs.size() + (args.slabs ? 0 : 1);
  const size_t fastest = stopwatch.fastest(queue.stream, args.scratch, kGemmWorkspaceBytes, count, [&](size_t i) {
    if (i < configs.size())
      tiles.run(queue, args, configs[i]);
    else
      library(queue, args);
    return true;
  });
  return fastest < configs.size() ? Way{true, configs[fastest]} : Way{false, expected};
}

Linears::State::Way Linears::State::way_of(const Queue& queue, const LinearArgs& args) {
  const Call call{.n = args.n,
                  .k = args.k,
                  .type = args.type,
                  .out_type = args.out_type,
                  .gated = args.gated,
                  .bias = args.bias != nullptr,
                  .residual = args.residual != nullptr,
                  .slabs = args.slabs != nullptr,
                  .m = args.m};
  auto near = ways.lower_bound(call);
  if (near != ways.end() && near->first == call) return near->second;
  if (worth_measuring(args.m) && !capturing(queue.stream)) return ways.emplace(call, measure(queue, args)).first->second;
  // As the next larger number of tokens that was measured, else the next smaller.
  if ((near == ways.end() || !near->first.like(call)) && near != ways.begin()) --near;
  const bool known = near != ways.end() && near->first.like(call);
  return {!known || near->second.tiled, choose_tiles(tiles.shape_of(args))};
}

void Linears::run(const Queue& queue, const LinearArgs& args) {
  if (args.m == 0) return;
  MAGA_CHECK(args.out_type == args.type || args.out_type == DType::f32, "out is of another type");
  MAGA_CHECK(!args.gated || (args.out_type == args.type && !args.residual && !args.slabs),
             "a gated linear has no residual, no slabs, and a result of its own type");
  if (state_->streams.takes(args)) {
    const StreamConfig config = choose_stream(state_->streams.shape_of(args));
    MAGA_CHECK(!args.slabs || config.split > 1, "slabs for a linear that is not split: n ", args.n, ", k ", args.k, ", m ", args.m);
    state_->streams.run(queue, args, config);
    return;
  }
  MAGA_CHECK(args.scratch, "no scratch");
  if (state_->tiles.takes(args)) {
    const auto [tiled, config] = state_->way_of(queue, args);
    MAGA_CHECK(!args.slabs || config.split > 1, "slabs for a linear that is not split: n ", args.n, ", k ", args.k, ", m ", args.m);
    if (tiled) {
      state_->tiles.run(queue, args, config);
      return;
    }
  }
  MAGA_CHECK(!args.slabs, "slabs for a linear that is not split: n ", args.n, ", k ", args.k, ", m ", args.m, ", x stride ",
             args.x_stride);
  state_->library(queue, args);
}

}  // namespace maga::cuda
