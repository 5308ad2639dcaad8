// Which way a linear goes: a streaming kernel where there is one for it, else cuBLASLt.
#include "backends/cuda/linear.h"

#include <algorithm>

#include "backends/cuda/cuda_check.h"
#include "backends/cuda/linear_gemm.h"
#include "backends/cuda/linear_stream.h"
#include "backends/cuda/rows.h"

namespace maga::cuda {
namespace {

constexpr int kMostStreamed = 64;  // tokens

int split_of(const Streams& streams, const LinearArgs& args) {
  if (args.gated || !streams.takes(args)) return 0;
  StreamShape shape = streams.shape_of(args);
  shape.may_split = true;
  const int split = choose_stream(shape).split;
  return split > 1 ? split : 0;
}

}  // namespace

int slabs_of(const LinearArgs& args) { return split_of(Streams(), args); }

int most_slabs(int n, int k, DType type) {
  const Streams streams;
  int most = 0;
  for (int m = 1; m <= kMostStreamed; ++m) most = std::max(most, split_of(streams, {.m = m, .n = n, .k = k, .type = type}));
  return most;
}

size_t linear_scratch_bytes(int64_t tokens, int64_t widest_gated_n, DType type) {
  return kGemmWorkspaceBytes + static_cast<size_t>(tokens * 2 * widest_gated_n * size_of(type));
}

struct Linears::State {
  Streams streams;
  Gemms gemms;
};

Linears::Linears() : state_(new State) {}
Linears::~Linears() { delete state_; }

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
  MAGA_CHECK(!args.slabs, "slabs for a linear that has no streaming kernel: n ", args.n, ", k ", args.k, ", m ", args.m,
             ", x stride ", args.x_stride);
  MAGA_CHECK(args.scratch, "no scratch");
  if (!args.gated) {
    state_->gemms.run(queue, args, args.scratch);
    return;
  }
  LinearArgs halves = args;  // (m, 2 n): gate | up
  halves.gated = false;
  halves.n = 2 * args.n;
  halves.out = static_cast<char*>(args.scratch) + kGemmWorkspaceBytes;
  halves.out_stride = halves.n;
  state_->gemms.run(queue, halves, args.scratch);
  activation(queue, args.type,
             {.gate = {halves.out, halves.out_stride},
              .up = {static_cast<char*>(halves.out) + args.n * size_of(args.type), halves.out_stride},
              .out = {args.out, args.out_stride},
              .rows = args.m,
              .width = args.n,
              .kind = args.activation});
}

}  // namespace maga::cuda
