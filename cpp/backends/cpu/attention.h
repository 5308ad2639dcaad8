// Attention over a step: the plan that spreads its rows over threads, and the run of it.
#pragma once

#include <vector>

#include "backends/cpu/attention_kernels.h"
#include "backends/cpu/batch.h"
#include "core/threads.h"

namespace maga::cpu {

// Floats of scratch that one thread needs.
int64_t attention_scratch_floats(int64_t group, int64_t head_dim, int64_t v_dim);

// What the work list depends on besides the step; ops of equal form share a plan.
struct AttentionForm {
  int64_t kv_heads, group, head_dim, v_dim, window;
  bool operator==(const AttentionForm&) const = default;
};

// The work list of a step. Built once a step, before the ops run.
class AttentionPlan {
 public:
  // `partials` has room for `capacity` floats: the states of row blocks that are split over threads by segments. What does not
  // fit is not split.
  AttentionPlan(const AttentionForm& form, float* partials, int64_t capacity)
      : form_(form), partials_(partials), capacity_(capacity) {}
  const AttentionForm& form() const { return form_; }
  void build(const Batch& batch, int threads);

  struct Call {
    const float* q;  // (tokens, kv_heads * group * head_dim)
    int64_t q_stride;
    float* out;  // (tokens, kv_heads * group * v_dim)
    int64_t out_stride;
    float scale;
    float soft_cap;
    const float* slopes;  // (heads) or null
    const float* sinks;   // (heads) or null
    KvLayer layer;
    float* scratch;  // (threads, scratch_floats)
    int64_t scratch_floats;
  };
  void run(ThreadPool& threads, const AttentionKernels& kernels, const Batch& batch, const Call& call) const;

 private:
  struct RowBlock {
    int64_t sequence, first_token, tokens;
    int64_t first_key;  // K/V index of the first token
    int64_t segment_begin, segment_end;
    double cost;      // multiply-adds in one KV head
    int64_t partial;  // of KV head 0, in floats; kNone: not split
  };
  struct Item {
    int64_t block, kv_head, segment_begin, segment_end;
  };
  void add_row_blocks(const Batch& batch, int64_t rows);
  void split(int threads);
  int64_t partial_of(const RowBlock& block, int64_t kv_head, int64_t segment) const;

  AttentionForm form_;
  float* partials_;
  int64_t capacity_;
  double cost_ = 0;
  std::vector<RowBlock> blocks_;  // the most expensive first
  std::vector<Item> items_;
  std::vector<int64_t> split_blocks_;
};

}  // namespace maga::cpu
