// The ragged batch that every op sees. Prefill, a chunk of it and decode differ only in how many tokens a sequence brings.
#pragma once

#include <cstdint>
#include <span>

namespace maga {

struct Step {
  std::span<const int32_t> ids;             // (tokens)
  std::span<const int32_t> positions;       // (tokens) for rope; apart from K/V indices, since prefixes and trees shift them
  std::span<const int32_t> sequence_start;  // (sequences + 1) first token of each sequence; the last entry is `tokens`
  std::span<const int32_t> kv_length;       // (sequences) K/V entries once this step's tokens are written
  std::span<const int32_t> prompt_length;   // (sequences) length-dependent rope uses max(prompt_length, position + 1)
  std::span<const int32_t> page_start;      // (sequences + 1) first entry of each sequence in `pages`
  std::span<const int32_t> pages;           // page ids, in order of K/V index
  std::span<const int32_t> logit_rows;      // (rows) tokens whose logits are wanted, ascending
  // (tokens) or empty: of the tokens that its sequence brings (64 at most), which a token sees, itself included; bit i is the
  // i-th. Earlier tokens it sees all. Empty: those up to itself. For trees of drafts.
  std::span<const uint64_t> tree;
  // (sequences) or empty: every token of a sequence sees the keys of indices below this one, the later ones of them too. The step
  // that brings them brings all of them.
  std::span<const int32_t> context;
  std::span<const int32_t> block_positions;  // (tokens), where a rope table turns by them

  int64_t tokens() const { return static_cast<int64_t>(ids.size()); }
  int64_t sequences() const { return static_cast<int64_t>(kv_length.size()); }
};

}  // namespace maga
