// Puts the sequences of a plan into the flat arrays of a Step. The arrays keep their memory from step to step.
#pragma once

#include <vector>

#include "engine/sequence.h"
#include "program/step.h"

namespace maga {

class StepBuilder {
 public:
  // The largest step: nothing is allocated up to these sizes.
  StepBuilder(int64_t tokens, int64_t sequences, int64_t pages);
  void clear();
  // The next `tokens` tokens of a sequence, whose pages must have room for them. If they are its last, their last row gets
  // logits: returns its number, or -1. A token that is not known yet is named by the draw that chooses it.
  int32_t add(const Sequence& sequence, int64_t tokens, int64_t page_tokens);
  bool empty() const { return kv_length_.empty(); }
  Step step() const;

 private:
  std::vector<int32_t> ids_, positions_, sequence_start_, kv_length_, prompt_length_, page_start_, pages_, logit_rows_;
  std::vector<int32_t> context_, block_positions_;  // of programs with a ContextRule
  bool brings_context_ = false;
};

}  // namespace maga
