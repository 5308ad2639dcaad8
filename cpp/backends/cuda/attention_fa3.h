// FlashAttention-3 for long prompts on sm_90, from FlashInfer's headers; only in builds that have them (MAGA_FLASHINFER).
#pragma once

#include <memory>
#include <vector>

#include "backends/cuda/attention.h"

namespace maga::cuda {

constexpr int64_t kFa3Tokens = 64;  // a sequence that brings fewer would waste most of a tile

// What a kernel is called with; plain types, so that FlashInfer stays in attention_fa3_hd*.cu.
struct Fa3Call {
  const void* q = nullptr;
  void* out = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  int64_t q_stride = 0, out_stride = 0, page_stride = 0, head_stride = 0;
  int tokens = 0, heads = 0, kv_heads = 0, page_tokens = 0;
  float scale = 1;
  const int32_t* pages = nullptr;
  // Items of work by CTA: work_start (SMs + 1), the others (items).
  const int32_t* work_start = nullptr;
  const int32_t* tile = nullptr;         // of the sequence's tokens
  const int32_t* head = nullptr;         // query head
  const int32_t* first_token = nullptr;  // of the sequence
  const int32_t* first_page = nullptr;   // of the sequence, in `pages`
  const int32_t* q_length = nullptr;
  const int32_t* kv_length = nullptr;
};

struct Fa3Kernel {
  cudaError_t (*run)(const Fa3Call& call, cudaStream_t stream) = nullptr;
  int tile = 0;  // tokens
};

// The schedule of a step: every (tile, head) goes to the CTA that is the least loaded so far, the longest first.
class Fa3Plan {
 public:
  Fa3Plan(const Fa3Kernel& kernel, const AttentionShape& shape, int64_t tokens);
  ~Fa3Plan();
  Fa3Plan(const Fa3Plan&) = delete;
  // For the sequences from `first_sequence` on.
  void plan(const Queue& queue, const Step& host, int first_sequence);
  void run(const Queue& queue, const DeviceStep& step, const AttentionArgs& args) const;

 private:
  // The work of a step on its way to the device; two, so that a step can be planned while the copy for the one before is under way.
  struct Staging {
    int32_t* data = nullptr;
    cudaEvent_t copied = nullptr;
  };
  struct Item {
    int tile, head, sequence;
  };
  Fa3Kernel kernel_;
  AttentionShape shape_;
  int sms_ = 0;
  int64_t most_items_ = 0, items_ = 0;
  int32_t* device_ = nullptr;
  Staging staging_[2];
  int turn_ = 0;
  std::vector<std::vector<Item>> work_;  // by CTA
};

// Null where the build, the device or the shape has no FlashAttention-3. A layer that asks for a soft cap, ALiBi or sinks must not
// use the plan.
std::unique_ptr<Fa3Plan> make_fa3_plan(const AttentionShape& shape, DType type, int64_t tokens);

#define MAGA_FA3_KERNELS(X) X(64, bf16) X(64, f16) X(128, bf16) X(128, f16) X(256, bf16) X(256, f16)
#define MAGA_DECLARE(d, type) Fa3Kernel attention_fa3_hd##d##_##type();
MAGA_FA3_KERNELS(MAGA_DECLARE)
#undef MAGA_DECLARE

}  // namespace maga::cuda
