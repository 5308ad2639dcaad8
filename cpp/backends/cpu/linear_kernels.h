// What the matrix kernels read and offer. Plain structs only, for the reason that vec.h gives.
#pragma once

#include "backends/cpu/vec.h"

namespace maga::cpu {

constexpr int kPanelRows = 16;

enum class Form : uint8_t { f32, f16, bf16, nibbles, bytes };

// A matrix is a sequence of panels of 16 rows, the last one filled up with zeros. In a panel,
//   dense:   values  [cols][16 rows], in their own type
//   nibbles: codes   [cols / 8][16 rows][4 bytes]; byte i holds columns i (low nibble) and 4 + i (high nibble) of its 8
//   bytes:   codes   [cols / 4][16 rows][4 bytes]
// and before the codes: scales [groups][16 rows], then offsets likewise if there are any, each part 64-byte aligned.
// So one vector of codes holds 4 columns of 4, 8 or 16 rows; against 4 broadcast activations a dot product lands in the row's
// own lane, and decoding reads memory front to back.
struct PackedMatrix {
  const std::byte* data = nullptr;  // 64-byte aligned
  int64_t rows = 0, cols = 0;
  int64_t panels = 0, panel_bytes = 0;
  Form form = Form::f32;

  // Codes only. A unit is the block of columns whose integer dot product is exact and meets one scale: 32, or 16 where groups
  // are odd multiples of 16. Columns are filled up to whole units.
  int unit = 0;
  int64_t units = 0, group_units = 0;
  int zero = 0;
  bool half_scales = false;  // scales and offsets are fp16, because that holds all of them exactly; else fp32
  bool has_offset = false;
  int64_t offset_at = 0, codes_at = 0;  // bytes from the start of a panel
};

// One range of a matrix product: tokens in tiles, outputs in blocks of 16.
struct LinearTask {
  const PackedMatrix* weight;
  const std::byte* activations;  // written by `prepare`
  int64_t tokens;
  float* out;
  int64_t out_stride;
  const float* bias;
  const float* residual;
  int64_t residual_stride;
  bool gated;
  ActivationKind activation;
};

struct Range {
  int64_t begin, end;
};

// Activations are prepared once a call, into tiles of `tile_tokens` tokens that lie interleaved, so that a kernel addresses all
// of a tile's tokens from one pointer. The last tile may hold fewer.
struct LinearKernels {
  int tile_tokens;
  void (*prepare)(const PackedMatrix& weight, const float* x, int64_t x_stride, int64_t tokens, Range tiles, std::byte* out);
  void (*run)(const LinearTask& task, Range blocks, Range tiles);
};

struct IsaKernels {
  LinearKernels exact, quantized;
};

extern const IsaKernels kGenericKernels, kAvx2Kernels, kAvx512Kernels, kAvx512VnniKernels, kNeonKernels, kNeonDotprodKernels;

}  // namespace maga::cpu
