// A step on its way to the card: laid out in page-locked memory and copied at once.
#pragma once

#include <span>

#include "backends/backend.h"
#include "backends/cuda/device_step.h"
#include "backends/cuda/memory.h"
#include "backends/cuda/queue.h"

namespace maga::cuda {

// Rows of a launch. In a captured graph they are fixed, and what a step leaves unused is padding.
struct StepShape {
  int tokens = 0, sequences = 0, rows = 0, draws = 0;
  bool tree = false, context = false, blocks = false;  // which of the arrays that few steps have
};

// Where the arrays of a step lie, in bytes. Page ids come last, as their number changes from step to step.
struct StepLayout {
  explicit StepLayout(const StepShape& shape);
  int64_t slots, tree, draws, ids, positions, token_sequence, sequence_start, kv_length, prompt_length, page_start, logit_rows,
      context, block_positions, pages;
  int64_t bytes(int64_t page_ids) const { return pages + page_ids * static_cast<int64_t>(sizeof(int32_t)); }
};

class Staging {
 public:
  // `page_ids`: the most that the sequences of a step list together.
  Staging(const Limits& limits, int64_t page_ids);

  // Lays the step out as `shape`, which is at least as large, and queues its copy. Page-locked memory is used in turns: a slot may
  // be written again when the copy from it is done. `keeps_kv`: whether tokens have slots.
  void stage(const Queue& queue, int slot, const StepShape& shape, const Step& step, std::span<const Draw> draws, bool keeps_kv);

  // The arrays on the card, for steps staged as `shape`.
  DeviceStep step(const StepShape& shape) const;
  const Draw* draws(const StepShape& shape) const;
  int64_t bytes() const { return device_.bytes(); }

 private:
  int64_t page_tokens_, page_ids_;
  PinnedMemory pinned_[Executable::kStepsInFlight];
  DeviceMemory device_;
};

}  // namespace maga::cuda
