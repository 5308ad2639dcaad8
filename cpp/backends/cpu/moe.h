// Mixtures of experts: tokens are sorted by expert, and each expert's linears run over its tokens.
#pragma once

#include "backends/cpu/linear.h"
#include "backends/cpu/mapping.h"
#include "program/program.h"

namespace maga::cpu {

struct MoeCall {
  const Moe* op = nullptr;
  int64_t tokens = 0;
  const float* x = nullptr;  // (tokens, in), rows `x_stride` apart; the others likewise
  int64_t x_stride = 0;
  const float* logits = nullptr;  // (tokens, experts)
  int64_t logits_stride = 0;
  float* out = nullptr;  // (tokens, out)
  int64_t out_stride = 0;
  const float* residual = nullptr;  // like out, or null; may be `out` itself
  int64_t residual_stride = 0;
  const StackedWeight* gate_up = nullptr;
  const StackedWeight* down = nullptr;
  const float* gate_up_bias = nullptr;
  const float* down_bias = nullptr;
  const float* correction = nullptr;
  bool quantize_activations = false;  // see LinearCall
};

// The experts of one token, best first, and their weights: top_k of each.
void route(const Routing& routing, const float* logits, const float* correction, int32_t* experts, float* weights);

// The memory that the Moe ops of a program share.
class Experts {
 public:
  Experts(const Program& program, const Limits& limits);

  // A token's result is the same, bit for bit, whatever other tokens are in the call and however many threads run it.
  void run(ThreadPool& threads, Isa isa, std::byte* linear_scratch, const MoeCall& call);
  int64_t bytes() const { return memory_ ? memory_->bytes() : 0; }

 private:
  // A token that an expert works on.
  struct Entry {
    int32_t token;
    float weight;
  };

  // Where the experts' results are added up, (tokens, out).
  struct Sums {
    float* data;
    int64_t stride;
    float* of(int64_t token) const { return data + token * stride; }
  };

  void sort(const MoeCall& call);
  void run_expert(ThreadPool& threads, Isa isa, std::byte* linear_scratch, const MoeCall& call, int64_t expert,
                  std::span<const Entry> entries, const Sums& sums);

  int64_t most_rows_ = 0;  // of an expert at a time
  std::unique_ptr<Mapping> memory_;
  float* rows_ = nullptr;              // for one expert: tokens, results, hidden, gate and up
  float* sums_ = nullptr;              // (tokens, out), where there is a residual
  std::vector<int32_t> chosen_;        // (tokens, top_k)
  std::vector<float> weights_;         // (tokens, top_k)
  std::vector<Entry> entries_;         // (tokens * top_k) by expert, then by token
  std::vector<int64_t> expert_start_;  // (experts + 1) in `entries_`
};

}  // namespace maga::cpu
