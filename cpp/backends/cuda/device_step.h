// A Step in device memory. Counts are those of the launch: in a captured graph the batch bucket, of which a part may be padding.
#pragma once

#include <cstdint>

namespace maga::cuda {

struct DeviceStep {
  int tokens = 0;     // rows of every value; padding tokens have slot -1
  int sequences = 0;  // padding sequences bring no token and have kv_length 0
  int rows = 0;       // rows of logits

  // Device pointers, in the layout of program/step.h.
  const int32_t* ids = nullptr;             // (tokens) below 0: -1 - i is the token that draw i of the step before chose
  const int32_t* chosen = nullptr;          // the tokens which the draws of the step before chose
  const int32_t* positions = nullptr;       // (tokens)
  const int32_t* sequence_start = nullptr;  // (sequences + 1)
  const int32_t* kv_length = nullptr;       // (sequences)
  const int32_t* prompt_length = nullptr;   // (sequences)
  const int32_t* page_start = nullptr;      // (sequences + 1)
  const int32_t* pages = nullptr;           // (page_start[sequences])
  const int64_t* slots = nullptr;  // (tokens) page * page_tokens + place in the page: where its K/V entry goes; -1: nowhere
  const int32_t* token_sequence = nullptr;  // (tokens) the sequence of each token
  const int32_t* logit_rows = nullptr;      // (rows) tokens

  // (tokens) or null: every token sees the tokens before it. Else bit i is set where the token sees the i-th token that its
  // sequence brings (what was in the pages before, it sees in any case); sequences that bring more than 64 tokens ignore it.
  const uint64_t* tree_mask = nullptr;
  const int32_t* context = nullptr;          // (sequences) or null: the step has none
  const int32_t* block_positions = nullptr;  // (tokens) or null: the program has no use for them
};

// The pages of one layer. Keys: pool + page * page_stride + head * head_stride + token * head_dim, in elements; values likewise,
// v_stride() apart. Those that are in the keys begin where the keys do.
struct KvLayer {
  void* k = nullptr;  // of page 0
  void* v = nullptr;
  int64_t page_stride = 0;    // elements, for keys and values alike
  int64_t k_head_stride = 0;  // page_tokens * head_dim
  int64_t v_head_stride = 0;  // page_tokens * v_stride()
  int page_tokens = 0;        // a power of two
  int kv_heads = 0, head_dim = 0, v_dim = 0;
  bool values_in_keys = false;
  // Of 8-bit codes: the bits of bf16 scales, pool + page * scale_stride + head * page_tokens + token; else null.
  uint16_t* k_scales = nullptr;
  uint16_t* v_scales = nullptr;
  int64_t scale_stride = 0;
  float k_scale = 0, v_scale = 0;  // that the program states, see CacheLayer

  constexpr int v_stride() const { return values_in_keys ? head_dim : v_dim; }
};

}  // namespace maga::cuda
