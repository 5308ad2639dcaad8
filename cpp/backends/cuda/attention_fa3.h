// FlashAttention-3 for long prompts on sm_90, from FlashInfer's headers; only in builds that have them (MAGA_FLASHINFER).
#pragma once

#include <memory>
#include <vector>

#include "backends/cuda/attention.h"
#include "backends/cuda/attention_fa3_kernel.h"
#include "backends/cuda/memory.h"
#include "backends/cuda/stream.h"

namespace maga::cuda {

constexpr int64_t kFa3Tokens = 64;  // a sequence that brings fewer would waste most of a tile

// The schedules of a step: every (tile, head) goes to the CTA that is the least loaded so far, the longest first.
class Fa3Plan {
 public:
  Fa3Plan(const Fa3Kernel& kernel, const AttentionShape& shape, int64_t tokens);
  // For the sequences from `first_sequence` on.
  void plan(const Queue& queue, const Step& host, int first_sequence);
  // Whether some of them have no earlier tokens.
  bool has_fresh() const { return fresh_.items > 0; }
  void run(const Queue& queue, const DeviceStep& step, const AttentionArgs& args) const;

 private:
  // The work of a step on its way to the device; two, so that a step can be planned while the copy for the one before is under way.
  struct Staging {
    PinnedMemory memory;
    Event copied;
  };
  struct Item {
    int tile, head, sequence;
  };
  // The work of one launch; where it lies on the device, in int32s.
  struct Schedule {
    int64_t items = 0, offset = 0;
  };
  Schedule schedule(const Step& host, std::vector<int>& sequences, int32_t* staged, int64_t offset);
  void launch(const Queue& queue, const DeviceStep& step, const AttentionArgs& args, const Schedule& schedule, bool fresh) const;

  Fa3Kernel kernel_;
  AttentionShape shape_;
  int sms_ = 0;
  int64_t most_items_ = 0;
  Schedule fresh_, continued_;
  DeviceMemory memory_;
  Staging staging_[2];
  int turn_ = 0;
  std::vector<std::vector<Item>> work_;  // by CTA
};

// Null where the build, the device or the shape has no FlashAttention-3. A layer that asks for a soft cap, ALiBi or sinks must not
// use the plan.
std::unique_ptr<Fa3Plan> make_fa3_plan(const AttentionShape& shape, DType type, int64_t tokens);

}  // namespace maga::cuda
