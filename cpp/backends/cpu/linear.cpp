// Splits a matrix product over threads: contiguous rows for a single tile of tokens, where memory is the limit; otherwise blocks
// that keep their weights and activations in the second-level cache, taken one after another.
#include "backends/cpu/linear.h"

#include <algorithm>

namespace maga::cpu {
namespace {

constexpr int64_t kPassTokens = 768;         // tokens whose prepared activations the scratch holds; a multiple of every tile
constexpr int64_t kGroupTokens = 96;         // tokens of one work item, likewise
constexpr int64_t kItemBytes = 256 << 10;    // weights of one work item
constexpr int64_t kSerialPrepare = 8 << 10;  // activations that one thread prepares faster than it wakes another

const IsaKernels& kernels_of(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::avx2: return kAvx2Kernels;
    case Isa::avx512: return kAvx512Kernels;
    case Isa::avx512_vnni: return kAvx512VnniKernels;
#elif defined(__aarch64__)
    case Isa::neon: return kNeonKernels;
    case Isa::neon_dotprod: return kNeonDotprodKernels;
#endif
    default: return kGenericKernels;
  }
}

// Shares of the work for each thread: one that loses its core leaves the rest of its own to the others.
constexpr int kShares = 4;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

void run_pass(ThreadPool& threads, const LinearKernels& kernels, const PackedMatrix& w, std::byte* scratch, const float* x,
              int64_t x_stride, const LinearTask& task) {
  const int64_t tokens = task.tokens;
  if (tokens == 1 || tokens * w.cols <= kSerialPrepare)
    kernels.prepare(w, x, x_stride, tokens, {0, tokens}, scratch);
  else
    threads.parallel_for(tokens, divide_up(tokens, kShares * threads.size()),
                         [&](int64_t begin, int64_t end, int) { kernels.prepare(w, x, x_stride, tokens, {begin, end}, scratch); });

  const int64_t outputs = task.gated ? w.rows / 2 : w.rows;
  const int64_t blocks = divide_up(outputs, kPanelRows);
  const int64_t tiles = divide_up(tokens, kernels.tile_tokens);
  if (tiles == 1) {
    threads.parallel_for(blocks, divide_up(blocks, kShares * threads.size()),
                         [&](int64_t begin, int64_t end, int) { kernels.run(task, {begin, end}, {0, 1}); });
    return;
  }
  const int64_t group_tiles = kGroupTokens / kernels.tile_tokens;
  const int64_t groups = divide_up(tiles, group_tiles);
  const int64_t fair = blocks * groups / (kShares * threads.size());
  const int64_t cached = kItemBytes / (w.panel_bytes * (task.gated ? 2 : 1));
  const int64_t chunk = std::max<int64_t>(1, std::min(fair, cached));
  threads.parallel_for(divide_up(blocks, chunk) * groups, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t block = item / groups * chunk, tile = item % groups * group_tiles;
      kernels.run(task, {block, std::min(block + chunk, blocks)}, {tile, std::min(tile + group_tiles, tiles)});
    }
  });
}

}  // namespace

int64_t linear_scratch_bytes(int64_t tokens, int64_t cols) {
  // The largest form is fp32, columns filled up to a unit, tokens to a tile.
  return divide_up(std::min(tokens, kPassTokens), kPanelRows) * kPanelRows * divide_up(cols, 32) * 32 * 4;
}

void linear(ThreadPool& threads, Isa isa, std::byte* scratch, const LinearCall& call) {
  const PackedMatrix& w = call.weight->matrix();
  MAGA_CHECK(call.x_stride >= w.cols || call.tokens <= 1, "rows of ", w.cols, " activations, ", call.x_stride, " apart");
  MAGA_CHECK(!call.gated || w.rows % 2 == 0, "gated with ", w.rows, " rows");
  const IsaKernels& set = kernels_of(isa);
  const LinearKernels& kernels = w.unit && call.quantize_activations ? set.quantized : set.exact;
  for (int64_t first = 0; first < call.tokens; first += kPassTokens) {
    const LinearTask task{
        .weight = &w,
        .activations = scratch,
        .tokens = std::min(call.tokens - first, kPassTokens),
        .out = call.out + first * call.out_stride,
        .out_stride = call.out_stride,
        .bias = call.bias,
        .residual = call.residual ? call.residual + first * call.residual_stride : nullptr,
        .residual_stride = call.residual_stride,
        .gated = call.gated,
        .activation = call.activation,
    };
    run_pass(threads, kernels, w, scratch, call.x + first * call.x_stride, call.x_stride, task);
  }
}

}  // namespace maga::cpu
