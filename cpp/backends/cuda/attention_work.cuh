// How a step's attention is cut into work: tiles of packed query rows, blocks of keys, and an even share of both for every CTA.
//
// A sequence's query rows are packed per K/V head as (token, head of the group), so that the heads which share keys share a tile.
// The work of a step is the list of all (sequence, K/V head, tile, key block), in that order; a CTA takes `share` blocks in a row.
// A tile that reaches over several CTAs is merged by the last of them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace maga::cuda {

constexpr int kTreeTokens = 64;  // a tree mask covers sequences that bring at most this many tokens

// The part of a sequence in a work list.
struct WorkSequence {
  int first_token = 0, tokens = 0, kv_length = 0, page_start = 0;
  int context = 0;  // keys below this one every token sees
};

// A place in a work list; `sequence` counts in the list.
struct WorkPlace {
  int sequence = 0, head = 0, tile = 0, block = 0;
};

// What a CTA starts from, in one read.
struct alignas(16) WorkStart {
  WorkPlace place;
  WorkSequence sequence;
  int blocks = 0;  // that this CTA does
  int share = 0;   // of every CTA but the last
};

// One work list in device memory, filled by attention_plan.
struct WorkList {
  WorkSequence* sequences = nullptr;  // (sequences) those with work in this list
  WorkStart* starts = nullptr;        // (ctas)
  int* before = nullptr;              // (sequences) blocks before each sequence
  int ctas = 0;
  int rows = 0;        // packed rows of a tile
  int block_keys = 0;  // keys of a block
};

// What plan and kernel must see alike.
struct WorkShape {
  int group = 0;  // query heads that share a K/V head
  int kv_heads = 0;
  int window = 0;     // 0: all
  bool tree = false;  // the step has a tree mask
};

// The keys that the rows of one tile see.
struct TileKeys {
  int low = 0, high = 0;  // [low, high) holds all that any row sees
  int first_limit = 0;    // keys below this one are seen by every row, but for the window
};

__host__ __device__ constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }

__device__ inline int tiles_of(const WorkSequence& s, int group, int rows) { return divide_up(s.tokens * group, rows); }

__device__ inline TileKeys tile_keys(const WorkSequence& s, const WorkShape& shape, int tile, int rows) {
  const int first = tile * rows / shape.group;
  const int last = (min((tile + 1) * rows, s.tokens * shape.group) - 1) / shape.group;
  const int before = s.kv_length - s.tokens;
  const bool tree = shape.tree && s.tokens <= kTreeTokens;
  TileKeys keys;
  keys.low = shape.window > 0 ? max(0, before + first + 1 - shape.window) : 0;
  keys.high = tree ? s.kv_length : max(before + last + 1, s.context);
  keys.first_limit = tree ? before : max(before + first + 1, s.context);
  return keys;
}

}  // namespace maga::cuda
