// The attention kernels' interface: one table an instruction set. Plain structs and internal functions only, for the reason that
// vec.h gives.
//
// Keys are reduced in segments of fixed size, aligned to K/V index 0, and segments are merged in order. So the result of a
// (token, head) has the same bits alone and in a batch, in a chunk and in a whole prompt, on one thread and on many.
#pragma once

#include "backends/cpu/row_kernels.h"

namespace maga::cpu {

constexpr int64_t kSegmentTokens = 256;
constexpr int64_t kSegmentBlocks = kSegmentTokens / kBlockTokens;

// Rows of an item: enough that widening a segment of K/V to fp32 costs little beside the arithmetic over it.
constexpr int64_t kItemRows = 96;
constexpr int64_t kMaxTileRows = 8;  // rows of a register tile, at most

struct AttentionShape {
  int64_t group;   // query heads that share a KV head
  int64_t window;  // keys that a query sees, itself included; 0: all
  float scale;
  float soft_cap;       // 0: none
  const float* slopes;  // (heads) ALiBi, or null
  const float* sinks;   // (heads), or null
  KvLayer layer;
};

// Some tokens of a sequence, in the query heads of one KV head, against a run of segments. A row is a (token, head of the group).
struct AttentionItem {
  const float* q;  // the first token's row, at the group's first head
  int64_t q_stride;
  float* out;
  int64_t out_stride;
  int64_t tokens;
  int64_t first_key;     // K/V index of the first token
  const int32_t* pages;  // of the sequence
  const uint64_t* tree;  // (tokens) see Step::tree, or null
  int64_t first_new;     // K/V index of the first token that the sequence brings: bit 0 of `tree`
  int64_t context;       // keys below this index every token sees
  int64_t kv_head;
  int64_t segment_begin, segment_end;
  float* partial;  // null: finish into `out`; else one segment's state goes here, see partial_floats
};

// The segments of some rows that several threads worked on.
struct AttentionMerge {
  float* partials;  // (segments, partial_floats); the first takes in the others
  int64_t segments;
  float* out;
  int64_t out_stride;
  int64_t tokens, group, v_dim;
  const float* sinks;  // (group), or null
};

static constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// (rows) maxima, (rows) sums, (rows, v_dim rounded up) weighted values
static constexpr int64_t partial_floats(int64_t rows, int64_t v_dim) { return rows * (2 + round_up(v_dim, 16)); }

struct AttentionKernels {
  void (*attend)(const AttentionShape&, const AttentionItem&, float* scratch);
  void (*merge)(const AttentionMerge&);
};

extern const AttentionKernels kAttentionGeneric, kAttentionAvx2, kAttentionAvx512, kAttentionNeon;

}  // namespace maga::cpu
