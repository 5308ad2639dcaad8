// Linears whose weights are 4-bit or 8-bit codes, on Hopper, bf16 and fp16: how the codes lie, which kernel a call gets, its
// launch.
//
// A unit is 8 rows by 128 columns of the weight, units lie row by row. It holds codes in the order in which wgmma wants its operand
// from registers, 16 or 32 bytes a lane of a warp, and then the scales (sets, 8 rows) of the 128 / sets columns each, and the
// shifts likewise. One packing serves every kernel: a tensor copy brings any rectangle of units.
//
// The kernel is the streaming one of linear_stream.h with two differences: weights become numbers in registers, on wgmma's 64-row
// side, and there may be up to 256 tokens on the other, and several such tiles.
#pragma once

#include <cuda.h>

#include <vector>

#include "backends/cuda/linear.h"
#include "backends/cuda/rows.h"
#include "program/weight.h"

namespace maga::cuda {

constexpr int kUnitRows = 8, kUnitColumns = 128;

// A layout's `bits` are 4, 8, or this, which stands for e4m3: 8 bits that are numbers, value = number * scale, with one fp32 scale
// for each row of a unit.
constexpr int kE4m3 = 9;

constexpr int affine_code_bytes(const AffineLayout& layout) { return kUnitRows * kUnitColumns / (layout.bits == 4 ? 2 : 1); }
constexpr int affine_unit_bytes(const AffineLayout& layout) {
  return affine_code_bytes(layout) +
         layout.sets * kUnitRows * 2 * (layout.shift == AffineShift::none && layout.bits != kE4m3 ? 1 : 2);
}
constexpr int64_t affine_units(int64_t size, int64_t of) { return (size + of - 1) / of; }
constexpr int64_t affine_bytes(const AffineLayout& layout, int64_t rows, int64_t cols) {
  return affine_units(rows, kUnitRows) * affine_units(cols, kUnitColumns) * affine_unit_bytes(layout);
}

// How a weight is packed; bits 0: it cannot be, and `why` says so.
AffineLayout affine_layout(const Affine& weight, DType type, std::string* why);

// Rows of an affine weight as they come: in device memory, contiguous.
struct AffineRows {
  const uint8_t* codes = nullptr;  // (rows, cols)
  const float* scale = nullptr;    // (rows, cols / group)
  const float* offset = nullptr;   // the same, or null
  int64_t rows = 0, cols = 0, group = 0;
  int zero = 0;
};
// The units of `from`; rows that are missing to a whole unit are made up.
void affine_pack(cudaStream_t stream, DType type, const AffineLayout& layout, const AffineRows& from, void* units);

constexpr AffineLayout kFloat8Layout{.bits = kE4m3, .sets = 1};
struct Float8Rows {
  const uint8_t* codes = nullptr;  // (rows, cols)
  const float* scale = nullptr;    // (rows, cols / 128, rounded up)
  int64_t rows = 0, cols = 0;
};
void float8_pack(cudaStream_t stream, const Float8Rows& from, void* units);

// Rows [first, first + rows) of a weight of `cols` columns as (rows, cols) of `type`; `first` is a multiple of 8.
void affine_unpack(const Queue& queue, DType type, const AffineLayout& layout, const void* units, int64_t first, int64_t rows,
                   int64_t cols, void* to);
// As `embed`, out of a table of units.
void affine_embed(const Queue& queue, DType type, const AffineLayout& layout, const DeviceStep& step, const EmbedArgs& args);

struct AffineShape {
  int m = 0;
  int rows = 0;  // of the weight; gated: 2 n
  int k = 0;
  AffineLayout layout;
  bool may_split = false;
  int sms = 0;
};

// What is compiled, for each type and number of bits.
struct AffineTile {
  int tokens;  // padded
  int groups;  // warpgroups
  int tiles;   // of 64 rows, a warpgroup
  constexpr int rows() const { return 64 * groups * tiles; }
  auto operator<=>(const AffineTile&) const = default;
};
constexpr AffineTile kAffineTiles[] = {{8, 1, 1},  {8, 2, 1},  {8, 2, 2},   {16, 2, 1},  {16, 2, 2},  {32, 2, 1}, {32, 2, 2},
                                       {64, 2, 1}, {64, 2, 2}, {128, 2, 1}, {128, 2, 2}, {192, 2, 1}, {256, 2, 1}};
// Plain: one set of scales a unit and no shifts, as most weights are. The others have fewer tiles to choose from.
constexpr bool affine_plain(const AffineLayout& layout) { return layout.sets == 1 && layout.shift == AffineShift::none; }
constexpr bool affine_compiled(const AffineTile& tile, bool plain) {
  return plain || (tile.tokens <= 128 ? tile.tiles == 2 : tile.tokens == 256);
}
// Units along k that a ring step holds.
constexpr int affine_step_units(const AffineTile& tile, int bits) { return bits == 4 && tile.tokens <= 32 ? 2 : 1; }

constexpr int kAffineMostShared = 232448;  // bytes a CTA may have
constexpr int kAffineHeader = 1024;        // barriers, 32 bytes a stage
constexpr int kAffineMostStages = kAffineHeader / 32;
constexpr int affine_step_bytes(const AffineTile& tile, const AffineLayout& layout) {
  const int units = affine_step_units(tile, layout.bits);
  const int bytes = units * 2 * tile.tokens * 128 + tile.rows() / kUnitRows * units * affine_unit_bytes(layout);
  return (bytes + 1023) / 1024 * 1024;
}
constexpr int affine_shared_bytes(const AffineTile& tile, const AffineLayout& layout, int stages) {
  return 1024 + kAffineHeader + stages * affine_step_bytes(tile, layout);  // 1024: to align
}

struct AffineConfig {
  AffineTile tile;
  int split;   // of k
  int ctas;    // a slice of k; CTA i takes tiles i, i + ctas, ...
  int stages;  // ring steps in shared memory
  int window;  // ring steps under way at once, see linear_stream_choose.cpp
};

AffineConfig choose_affine(const AffineShape& shape);
// All that make sense, for the benchmark to compare with the choice.
std::vector<AffineConfig> affine_configs(const AffineShape& shape);

class Affines {
 public:
  Affines();
  // Whether the kernel takes this call on this device.
  bool takes(const LinearArgs& args) const;
  AffineShape shape_of(const LinearArgs& args) const;
  void run(const Queue& queue, const LinearArgs& args, const AffineConfig& config);

 private:
  int sms_ = 0;
  bool hopper_ = false;
  std::vector<const void*> raised_;  // kernels allowed their shared memory
};

}  // namespace maga::cuda
