// Attention over pages: own kernels for every shape, and FlashAttention-3 for long prompts on sm_90.
//
// The work of a step is laid out once, for all layers of one shape, by plan(); run() then does one layer. A plan that may be
// captured into a graph reads lengths and page tables from device memory only.
#pragma once

#include "backends/cuda/device_step.h"
#include "backends/cuda/queue.h"
#include "core/dtype.h"
#include "program/step.h"

namespace maga::cuda {

// What layers must share to share a plan.
struct AttentionShape {
  int heads = 0, kv_heads = 0, head_dim = 0, v_dim = 0;
  int64_t window = 0;           // 0: all
  bool special_scores = false;  // some layer has a soft cap, ALiBi or sinks
  bool operator==(const AttentionShape&) const = default;
};

struct AttentionArgs {
  const void* q = nullptr;  // (tokens, heads * head_dim)
  int64_t q_stride = 0;
  void* out = nullptr;  // (tokens, heads * v_dim); every row is written, padding rows with zeros
  int64_t out_stride = 0;
  float scale = 1;
  float soft_cap = 0;                   // 0: none; else scores = cap * tanh(score / cap)
  const float* alibi_slopes = nullptr;  // (heads) or null: slope * (key position - query position) is added
  const void* sinks = nullptr;          // (heads) of the compute type, or null: a score that takes part in the softmax only
  KvLayer layer;
  // The keys and values of the step's own tokens, a row a token (values that are in the keys: the keys' rows); null: they are in
  // the pages only.
  const void* k = nullptr;  // (tokens, kv_heads * head_dim)
  const void* v = nullptr;  // (tokens, kv_heads * v_dim)
  int64_t k_stride = 0, v_stride = 0;
  // The kernel in front is prepare_qkv, which starts the next one only when all before it are done: the plan and keys of earlier
  // steps may be read while it runs.
  bool after_prepare = false;
};

class AttentionPlan {
 public:
  // `tokens` and `sequences`: the largest step.
  AttentionPlan(const AttentionShape& shape, DType type, DType kv_type, int page_tokens, int64_t tokens, int64_t sequences,
                int64_t pages);
  ~AttentionPlan();
  AttentionPlan(const AttentionPlan&) = delete;

  const AttentionShape& shape() const;
  DType kv_type() const;
  // `step` is on the device. `host` is the same step on the host, or null when the plan is captured into a graph: then each
  // sequence brings at most one token.
  void plan(const Queue& queue, const DeviceStep& step, const Step* host);
  // Whether the planned step is the faster for getting its own keys and values outside the pages too.
  bool wants_own_keys() const;
  // Whether it must get them then: FlashAttention-3 reads no pages of codes.
  bool needs_own_keys() const;
  // With the tokens that the step's sequences bring already in the pages.
  void run(const Queue& queue, const DeviceStep& step, const AttentionArgs& args);

 private:
  struct State;
  State* state_;
};

}  // namespace maga::cuda
