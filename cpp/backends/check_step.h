// Every size and index of a step is checked here, once, so that kernels need not.
#pragma once

#include "backends/backend.h"

namespace maga {

// What a program can take, found once.
struct StepBounds {
  explicit StepBounds(const Program& program)
      : keeps_kv(!program.cache_layers.empty()),
        vocab(program.vocab + program.virtual_tokens),
        positions(program.table_positions()) {
    for (const RopeTable& table : program.rope_tables) by_block |= table.by_block;
  }

  bool keeps_kv;          // whether it has K/V pages
  int64_t vocab;          // bounds token ids: of the vocabulary, and virtual ones
  int64_t positions;      // bounds positions; 0: nothing does
  bool by_block = false;  // whether it reads block positions
};

// Throws Error when the step does not fit. `earlier_draws`: draws of the step enqueued before, which ids may refer to.
void check_step(const Step& step, const Limits& limits, const StepBounds& bounds, int64_t earlier_draws = 0);

}  // namespace maga
