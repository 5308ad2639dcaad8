// Linears whose weights are codes in units (linear_affine.h), on every card from sm_80 on: for cards without wgmma, for e4m3 codes
// with tokens as they are, and for mixtures of experts. The units' order is mma.sync's as it is wgmma's.
//
// A CTA has eight warps. `deep` of them share rows and take turns along k, their sums meeting in shared memory; the others have
// rows of their own. Weights and tokens come by cp.async through a ring of steps of `deep` times 128 or 256 columns.
#pragma once

#include <vector>

#include "backends/cuda/linear_affine.h"
#include "backends/cuda/moe_gemm.h"

namespace maga::cuda {

// What is compiled, for each type and kind of codes.
struct MmaTile {
  int tokens;  // padded
  int tiles;   // of 16 rows, a warp
  auto operator<=>(const MmaTile&) const = default;
};
constexpr MmaTile kMmaTiles[] = {{8, 1}, {16, 1}, {32, 1}, {64, 2}};
// Codes of 8 bits go faster through tiles of 16 tokens, however few there are.
constexpr bool mma_compiled(const MmaTile& tile, int bits, bool plain) {
  if (tile.tokens == 8) return plain && bits == 4;
  return plain || tile.tokens == 16 || tile.tokens == 64;
}

constexpr int kMmaWarps = 8;
constexpr int kMmaMostStages = 8;
constexpr int mma_rows(const MmaTile& tile, int deep) { return kMmaWarps / deep * 16 * tile.tiles; }
// Units along k that a warp takes of a ring step.
constexpr int mma_step_units(int tokens, int bits) { return bits == 4 && tokens <= 16 ? 2 : 1; }
constexpr int mma_step_bytes(const MmaTile& tile, const AffineLayout& layout, int deep) {
  const int units = mma_step_units(tile.tokens, layout.bits);
  const int bytes = deep * units * tile.tokens * 256 + kMmaWarps * tile.tiles * 2 * units * affine_unit_bytes(layout);
  return (bytes + 127) / 128 * 128;
}
// For the sums of warps that share rows.
constexpr int mma_sums_bytes(const MmaTile& tile, int deep) { return (deep - 1) * (kMmaWarps / deep) * tile.tokens * 64; }

struct MmaShape {
  double matrices = 1;  // experts that have tokens
  int m = 0;            // tokens, of each of them
  int rows = 0;         // of a weight; gated: 2 n
  int k = 0;
  AffineLayout layout;
  bool may_split = false;
};
struct MmaCard {
  int sms = 0;
  int shared = 0;         // bytes a CTA may have
  int shared_of_two = 0;  // and each of two on an SM
};
struct MmaConfig {
  MmaTile tile;
  int deep;   // warps along k: 1, 2, 4 or 8
  int split;  // of k, over CTAs
  int ctas;   // a slice of k; CTA i takes tiles i, i + ctas, ...
  int stages;
};

MmaConfig choose_mma(const MmaShape& shape, const MmaCard& card);
// All that make sense, for the benchmark.
std::vector<MmaConfig> mma_configs(const MmaShape& shape, const MmaCard& card);

class Mmas {
 public:
  Mmas();
  bool takes(const LinearArgs& args) const;
  MmaShape shape_of(const LinearArgs& args) const;
  const MmaCard& card() const { return card_; }
  void run(const Queue& queue, const LinearArgs& args, const MmaConfig& config);
  void run(const Queue& queue, const LinearArgs& args) { run(queue, args, choose_mma(shape_of(args), card_)); }

  // Experts' weights lie one after another, each in whole units.
  bool takes(DType type, const MoeGemmArgs& args) const;
  void run(const Queue& queue, DType type, const MoeGemmArgs& args);

 private:
  void launch_kernel(const Queue& queue, DType type, const AffineLayout& layout, const MmaConfig& config, struct MmaArgs& args);

  MmaCard card_;
  bool has_mma_ = false;
  std::vector<const void*> raised_;  // kernels allowed their shared memory
};

}  // namespace maga::cuda
