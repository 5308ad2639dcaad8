// Which way a linear goes: a streaming kernel for few tokens, and for many a tiled one or, unless its weight is of e4m3, cuBLASLt,
// whichever was measured to be faster. Codes have kernels of their own, or are made dense.
#include "backends/cuda/linear.h"

#include <algorithm>
#include <map>
#include <type_traits>

#include "backends/cuda/cuda_check.h"
#include "backends/cuda/linear_affine.h"
#include "backends/cuda/linear_gemm.h"
#include "backends/cuda/linear_measure.h"
#include "backends/cuda/linear_mma.h"
#include "backends/cuda/linear_quantize.h"
#include "backends/cuda/linear_stream.h"
#include "backends/cuda/linear_tiles.h"
#include "backends/cuda/rows.h"

namespace maga::cuda {
namespace {

constexpr int kFewTokens = 64;  // up to here the weights alone count, and streaming kernels take them
// Of the tiles that a shape may have, in the order of the estimate, which knows those of e4m3 less well.
constexpr int kTimedTiles = 4, kTimedFp8Tiles = 6;

// Tokens [first, first + count) of a call, or as many as there are.
LinearArgs piece_of(const LinearArgs& args, int first, int count) {
  const auto moved = [&](auto* from, int64_t stride, DType type) {
    using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(from)>>, const std::byte, std::byte>;
    return from ? static_cast<Byte*>(from) + first * stride * size_of(type) : nullptr;
  };
  LinearArgs piece = args;
  piece.m = std::min(count, args.m - first);
  piece.rounded = args.rounded && piece.m == args.m;
  piece.x = moved(args.x, args.x_stride, args.type);
  piece.out = moved(args.out, args.out_stride, args.out_type);
  piece.residual = moved(args.residual, args.residual_stride, args.type);
  return piece;
}

// What chooses kernels for a device.
struct Kinds {
  Streams streams;
  Tiles tiles;
  Affines affines;
  Mmas mmas;

  // Parts of k that the next kernel is to add up; 1: none.
  int split_of(const LinearArgs& args) const {
    const auto split = [](auto shape, auto&& choose) {
      shape.may_split = true;
      return choose(shape).split;
    };
    if (args.gated) return 1;
    if (args.layout.form == WeightForm::affine) {
      if (args.m > kMostSplitTokens) return 1;
      if (affines.takes(args)) return split(affines.shape_of(args), choose_affine);
      const auto choose = [&](const MmaShape& shape) { return choose_mma(shape, mmas.card()); };
      return mmas.takes(args) ? split(mmas.shape_of(args), choose) : 1;
    }
    if (streams.takes(args)) return split(streams.shape_of(args), choose_stream);
    return tiles.takes_slabs(args) ? split(tiles.shape_of(args), choose_tiles) : 1;
  }
  int slabs_of(const LinearArgs& args) const {
    const int split = split_of(args);
    return split > 1 ? split : 0;
  }
};

}  // namespace

int slabs_of(const LinearArgs& args) { return Kinds().slabs_of(args); }

bool takes_rounded(int m, int k) { return !stream_rounds(m) && m <= most_quantized(kWidenedBytes, k); }

int64_t most_slab_rows(int64_t tokens, int n, int k, DType type, const WeightLayout& layout) {
  const Kinds kinds;
  int64_t most = 0;
  for (int64_t m = 1; m <= std::min<int64_t>(tokens, kMostSplitTokens); ++m)
    most = std::max(most,
                    m * kinds.slabs_of({.layout = layout, .x_stride = 8, .m = static_cast<int>(m), .n = n, .k = k, .type = type}));
  return most;
}

size_t linear_scratch_bytes(int64_t tokens, int64_t widest_gated_n, DType type) {
  return kGemmWorkspaceBytes + static_cast<size_t>(tokens * 2 * widest_gated_n * size_of(type));
}

struct Linears::State {
  // What makes another way the fastest.
  struct Call {
    int n, k;
    WeightLayout layout;
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
    bool own;         // our kernel, else cuBLASLt; of codes: our kernel for them, else one for the weight made dense
    TileConfig tile;  // of a dense weight
  };

  Way way_of(const Queue& queue, const LinearArgs& args);
  Way measure(const Queue& queue, LinearArgs args);
  void library(const Queue& queue, const LinearArgs& args);
  void dense(const Queue& queue, const LinearArgs& args);
  void affine(const Queue& queue, const LinearArgs& args);
  void coded(const Queue& queue, const LinearArgs& args);
  void fp8(const Queue& queue, const LinearArgs& args);
  void widened(const Queue& queue, const LinearArgs& args);
  template <typename Run>
  void in_halves(const Queue& queue, const LinearArgs& args, Run&& run);

  Kinds kinds;
  Gemms gemms;
  Stopwatch stopwatch;
  std::map<Call, Way> ways;
};

Linears::Linears() : state_(new State) {}
Linears::~Linears() { delete state_; }

// A gated linear as run(a plain one) and its activation.
template <typename Run>
void Linears::State::in_halves(const Queue& queue, const LinearArgs& args, Run&& run) {
  LinearArgs halves = args;  // (m, 2 n): gate | up
  halves.gated = false;
  halves.n = 2 * args.n;
  halves.out = static_cast<char*>(args.scratch) + kGemmWorkspaceBytes;
  halves.out_stride = halves.n;
  run(halves);
  activation(queue, args.type,
             {.gate = {halves.out, halves.out_stride},
              .up = {static_cast<char*>(halves.out) + args.n * size_of(args.type), halves.out_stride},
              .out = {args.out, args.out_stride},
              .rows = args.m,
              .width = args.n,
              .kind = args.activation});
}

void Linears::State::library(const Queue& queue, const LinearArgs& args) {
  if (args.gated)
    in_halves(queue, args, [&](const LinearArgs& halves) { gemms.run(queue, halves, args.scratch); });
  else
    gemms.run(queue, args, args.scratch);
}

Linears::State::Way Linears::State::measure(const Queue& queue, LinearArgs args) {
  const bool fp8 = args.layout.form == WeightForm::fp8;
  const TileShape shape = kinds.tiles.shape_of(args);
  const TileConfig expected = choose_tiles(shape);
  // In place, a repetition would add to the result of the one before.
  const Temporary temporary(args.residual ? args.m * args.out_stride * size_of(args.out_type) : 0);
  if (args.residual) args.out = temporary.data;
  if (args.residual && !args.out) return {true, expected};
  if (args.layout.form == WeightForm::affine) {
    const size_t fastest = stopwatch.fastest(queue.stream, args.scratch, kGemmWorkspaceBytes, 2, [&](size_t i) {
      if (i == 0)
        coded(queue, args);
      else
        widened(queue, args);
      return true;
    });
    return {fastest == 0, expected};
  }
  std::vector<TileConfig> configs = tile_configs(shape);
  std::erase_if(configs, [&](const TileConfig& config) { return config.split != expected.split; });
  configs.resize(std::min<size_t>(configs.size(), fp8 ? kTimedFp8Tiles : kTimedTiles));
  const size_t count = configs.size() + (args.slabs || fp8 ? 0 : 1);
  const size_t fastest = stopwatch.fastest(queue.stream, args.scratch, kGemmWorkspaceBytes, count, [&](size_t i) {
    if (i < configs.size())
      kinds.tiles.run(queue, args, configs[i]);
    else
      library(queue, args);
    return true;
  });
  return fastest < configs.size() ? Way{true, configs[fastest]} : Way{false, expected};
}

Linears::State::Way Linears::State::way_of(const Queue& queue, const LinearArgs& args) {
  const Call call{.n = args.n,
                  .k = args.k,
                  .layout = args.layout,
                  .type = args.type,
                  .out_type = args.out_type,
                  .gated = args.gated,
                  .bias = args.bias != nullptr,
                  .residual = args.residual != nullptr,
                  .slabs = args.slabs != nullptr,
                  .m = args.m};
  auto near = ways.lower_bound(call);
  if (near != ways.end() && near->first == call) return near->second;
  if (worth_measuring(args.m) && !capturing(queue.stream)) {
    const Way way = measure(queue, args);
    return ways.emplace(call, way).first->second;
  }
  // As the next larger number of tokens that was measured, else the next smaller.
  if ((near == ways.end() || !near->first.like(call)) && near != ways.begin()) --near;
  const bool known = near != ways.end() && near->first.like(call);
  return {!known || near->second.own, choose_tiles(kinds.tiles.shape_of(args))};
}

void Linears::State::dense(const Queue& queue, const LinearArgs& args) {
  if (kinds.streams.takes(args)) {
    kinds.streams.run(queue, args, choose_stream(kinds.streams.shape_of(args)));
    return;
  }
  MAGA_CHECK(args.scratch, "no scratch");
  if (kinds.tiles.takes(args)) {
    const auto [own, tile] = way_of(queue, args);
    if (own) {
      kinds.tiles.run(queue, args, tile);
      return;
    }
  }
  library(queue, args);
}

// By a kernel for codes: Hopper's where it takes the call.
void Linears::State::coded(const Queue& queue, const LinearArgs& args) {
  if (kinds.affines.takes(args))
    kinds.affines.run(queue, args, choose_affine(kinds.affines.shape_of(args)));
  else
    kinds.mmas.run(queue, args);
}

void Linears::State::affine(const Queue& queue, const LinearArgs& args) {
  const bool takes = kinds.affines.takes(args) || kinds.mmas.takes(args);
  if (takes && (args.m <= kFewTokens || args.slabs || way_of(queue, args).own))
    coded(queue, args);
  else
    widened(queue, args);
}

// Makes rows of the weight dense, as many as there is room for, and multiplies by them; then the next.
void Linears::State::widened(const Queue& queue, const LinearArgs& args) {
  MAGA_CHECK(args.widened && args.scratch, "no scratch");
  const int64_t row_bytes = args.k * size_of(args.type) * (args.gated ? 2 : 1);
  const int64_t fit = kWidenedBytes / row_bytes / kUnitRows * kUnitRows;
  MAGA_CHECK(fit > 0, args.k, " columns");
  if (args.gated && (args.n % kUnitRows != 0 || (args.bias && args.n > fit)))
    return in_halves(queue, args, [&](const LinearArgs& halves) { widened(queue, halves); });
  const int64_t parts = (args.n + fit - 1) / fit, rows = affine_units((args.n + parts - 1) / parts, kUnitRows) * kUnitRows;
  const auto moved = [](const auto* p, int64_t bytes) {
    return p ? const_cast<char*>(static_cast<const char*>(static_cast<const void*>(p))) + bytes : nullptr;
  };
  const Queue after_unpacking{queue.stream, false};  // kernels that overlap do not wait for their weights
  for (int64_t first = 0; first < args.n; first += rows) {
    LinearArgs part = args;
    part.n = static_cast<int>(std::min(rows, args.n - first));
    const auto unpack = [&](int64_t from, int64_t to) {
      affine_unpack(queue, args.type, args.layout.affine, args.weight, from, part.n, args.k,
                    moved(args.widened, to * args.k * size_of(args.type)));
    };
    unpack(first, 0);
    if (args.gated) unpack(args.n + first, part.n);
    part.layout = {};
    part.weight = args.widened;
    part.out = moved(args.out, first * size_of(args.out_type));
    part.bias = moved(args.bias, first * size_of(args.type));
    part.residual = moved(args.residual, first * size_of(args.type));
    dense(after_unpacking, part);
  }
}

// Streaming kernels round the fewest tokens themselves. More are rounded first, as many at a time as find room; results that lie
// where tiles cannot write are streamed too.
void Linears::State::fp8(const Queue& queue, const LinearArgs& args) {
  const int room = most_quantized(kWidenedBytes, args.k);
  MAGA_CHECK(args.widened && room >= kFewTokens, "no room for tokens of ", args.k, " columns");
  const auto stream = [&](const LinearArgs& piece) {
    kinds.streams.run(queue, piece, choose_stream(kinds.streams.shape_of(piece)));
  };
  if (kinds.streams.takes(args)) return stream(args);
  const bool tiled = kinds.tiles.takes(args);
  const int step = tiled ? room : kFewTokens;
  MAGA_CHECK(!args.slabs || (tiled && args.m <= room), "slabs for a linear in pieces: n ", args.n, ", k ", args.k, ", m ", args.m);
  for (int first = 0; first < args.m; first += step) {
    const LinearArgs piece = piece_of(args, first, step);
    if (kinds.streams.takes(piece)) {
      stream(piece);
      continue;
    }
    const LinearArgs rounded = linear_quantize(queue, piece);
    kinds.tiles.run(queue, rounded, way_of(queue, rounded).tile);
  }
}

void Linears::run(const Queue& queue, const LinearArgs& args) {
  if (args.m == 0) return;
  MAGA_CHECK(args.out_type == args.type || args.out_type == DType::f32, "out is of another type");
  MAGA_CHECK(!args.gated || (args.out_type == args.type && !args.residual && !args.slabs),
             "a gated linear has no residual, no slabs, and a result of its own type");
  MAGA_CHECK(!args.slabs || state_->kinds.split_of(args) > 1, "slabs for a linear that is not split: n ", args.n, ", k ", args.k,
             ", m ", args.m, ", x stride ", args.x_stride);
  switch (args.layout.form) {
    case WeightForm::dense: return state_->dense(queue, args);
    case WeightForm::affine: return state_->affine(queue, args);
    case WeightForm::fp8: return state_->fp8(queue, args);
  }
}

}  // namespace maga::cuda
