// Where each token's keys and values go.
#include "backends/cpu/batch.h"

namespace maga::cpu {

Batch::Batch(const Limits& limits, int64_t page_bytes, const Program& program)
    : limits_(limits), page_bytes_(page_bytes), bounds_(program) {
  slots_.reserve(limits.tokens);
}

void Batch::bind(const Step& step) {
  check_step(step, limits_, bounds_);
  step_ = step;
  slots_.clear();
  if (!bounds_.keeps_kv) return;
  for (int64_t s = 0; s < step.sequences(); ++s) {
    const int64_t end = step.sequence_start[s + 1];
    for (int64_t token = step.sequence_start[s]; token < end; ++token) {
      const int64_t index = step.kv_length[s] - (end - token);
      const int64_t page = step.pages[step.page_start[s] + index / limits_.page_tokens], within = index % limits_.page_tokens;
      slots_.push_back({.page = page * page_bytes_, .block = within / kBlockTokens, .lane = within % kBlockTokens});
    }
  }
}

}  // namespace maga::cpu
