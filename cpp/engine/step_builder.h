// Puts the sequences of a plan into the flat arrays of a Step. The arrays keep their memory from step to step.
#pragma once

#include <vector>

#include "backends/backend.h"
#include "engine/sequence.h"
#include "program/step.h"

namespace maga {

class StepBuilder {
 public:
  struct Rows {
    int32_t first = 0;   // of the sequence's rows of logits
    int32_t scored = 0;  // rows for the log probabilities of the prompt
    int32_t last = -1;   // the row of its last token, behind them; -1: it is not among the tokens
  };
  // The largest step: nothing is allocated up to these sizes.
  StepBuilder(const Limits& limits);
  void clear();
  // The next `tokens` tokens of a sequence, whose pages must have room for them, and the rows of logits that they need. A token
  // that is not known yet is named by the draw that chooses it.
  Rows add(const Sequence& sequence, int64_t tokens, int64_t page_tokens);
  bool empty() const { return kv_length_.empty(); }
  Step step() const;

 private:
  std::vector<int32_t> ids_, positions_, sequence_start_, kv_length_, prompt_length_, page_start_, pages_, logit_rows_;
  std::vector<int32_t> context_, block_positions_;  // of programs with a ContextRule
  bool brings_context_ = false;
};

}  // namespace maga
