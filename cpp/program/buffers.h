// Where values live: they share one arena, a value's bytes being free for others before it is written and after it is last read.
#pragma once

#include <vector>

#include "program/program.h"

namespace maga {

struct BufferPlan {
  std::vector<int64_t> offset;  // (values) bytes from the arena's start
  int64_t bytes = 0;            // of the arena
};

// A further op that reads a value, for backends that finish the work of an op in a later one.
struct LateRead {
  ValueId value = kNone;
  int64_t op = 0;
};

// `bytes[v]` is what value v needs. Inputs, outputs and logits overlap with nothing, so they can be written before a run and read
// after it.
BufferPlan plan_buffers(const Program& program, const std::vector<int64_t>& bytes, int64_t alignment,
                        const std::vector<LateRead>& late_reads = {});

}  // namespace maga
