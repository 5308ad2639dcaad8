// Kernels over rows of values, all but linears and attention: one table of functions an instruction set. Plain structs and
// internal functions only, for the reason that vec.h gives.
#pragma once

#include "backends/cpu/vec.h"

namespace maga::cpu {

// Tokens of a K/V block. A page holds whole blocks; keys lie transposed in a block, so a vector's lanes are tokens.
constexpr int64_t kBlockTokens = 16;

struct NormRows {
  const float* in;
  int64_t in_stride;
  float* out;
  int64_t out_stride;
  int64_t rows, groups, group;  // each row holds `groups` runs of `group` columns, normalised apart
  const float* weight;          // null: ones
  const float* bias;            // null: zeros
  int64_t own;                  // from a run's weight and bias to the next run's; 0: all runs share them
  NormKind kind;
  float eps, weight_offset;
};

struct ActivationRows {
  const float* gate;
  int64_t gate_stride;
  const float* up;  // null: none
  int64_t up_stride;
  float* out;
  int64_t out_stride;
  int64_t rows, width;
  ActivationKind kind;
};

struct BoundRows {
  const float* in;
  int64_t in_stride;
  float* out;
  int64_t out_stride;
  int64_t rows, width;
  BoundKind kind;
  float limit;
};

struct AddRows {
  const float* a;
  int64_t a_stride;
  const float* b;
  int64_t b_stride;
  float* out;
  int64_t out_stride;
  int64_t rows, width;
};

// Rotates `heads` heads of each row in place. `turns[row]`: rotary_dim / 2 cosines, then as many sines; interleaved: rotary_dim
// cosines, each twice, then rotary_dim sines, each twice, the first of a pair negated.
struct RopeRows {
  float* x;
  int64_t stride;
  int64_t rows, heads, head_dim, rotary_dim;
  bool interleaved;
  const float* const* turns;
};

// Where a token's keys and values go, before the layer's and the head's offset.
struct KvSlot {
  int64_t page;   // bytes from the pool's start to the page
  int64_t block;  // of the page's blocks of one head
  int64_t lane;   // of the block's tokens
};

// How one layer lies in a page: for each KV head, for each block: keys (head_dim, 16), then values (16, v_dim) unless they are in
// the keys, then, of 8-bit codes, the scales of the 16 keys and of the 16 values, in bf16.
struct KvLayer {
  std::byte* base;  // of page 0, at this layer
  int64_t page_bytes, blocks_per_page;
  int64_t block_bytes;
  int64_t kv_heads, head_dim, v_dim;
  bool values_in_keys;
  DType dtype;
  float k_scale, v_scale;  // see CacheLayer
};

static inline std::byte* kv_block(const KvLayer& layer, int64_t page_offset, int64_t head, int64_t block_of_page) {
  return layer.base + page_offset + (head * layer.blocks_per_page + block_of_page) * layer.block_bytes;
}

// Of a block of codes.
static inline BF16* kv_scales(const KvLayer& layer, const void* block) {
  return reinterpret_cast<BF16*>(static_cast<std::byte*>(const_cast<void*>(block)) + kBlockTokens * (layer.head_dim + layer.v_dim));
}

struct WriteKvRows {
  const float* k;
  int64_t k_stride;
  const float* v;
  int64_t v_stride;
  int64_t rows;
  KvLayer layer;
  const KvSlot* slots;
};

struct RowKernels {
  void (*norm)(const NormRows&);
  void (*activation)(const ActivationRows&);
  void (*bound)(const BoundRows&);
  void (*add)(const AddRows&);
  void (*rope)(const RopeRows&);
  void (*scale)(float* x, float factor, int64_t count);
  void (*write_kv)(const WriteKvRows&);
};

extern const RowKernels kRowsGeneric, kRowsAvx2, kRowsAvx512, kRowsNeon;

}  // namespace maga::cpu
