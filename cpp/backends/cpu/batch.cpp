// Every size and index of a step is checked here, once, so that kernels need not.
#include "backends/cpu/batch.h"

namespace maga::cpu {

Batch::Batch(const Limits& limits, int64_t page_bytes, int64_t vocab) : limits_(limits), page_bytes_(page_bytes), vocab_(vocab) {
  slots_.reserve(limits.tokens);
}

void Batch::check(const Step& s) const {
  const int64_t tokens = s.tokens(), sequences = s.sequences();
  const auto size = [](const auto& span) { return static_cast<int64_t>(span.size()); };
  MAGA_CHECK(tokens <= limits_.tokens, tokens, " tokens, limit ", limits_.tokens);
  MAGA_CHECK(sequences <= limits_.sequences, sequences, " sequences, limit ", limits_.sequences);
  MAGA_CHECK(size(s.logit_rows) <= limits_.logit_rows, size(s.logit_rows), " rows of logits, limit ", limits_.logit_rows);
  MAGA_CHECK(size(s.positions) == tokens, size(s.positions), " positions for ", tokens, " tokens");
  MAGA_CHECK(size(s.prompt_length) == sequences, size(s.prompt_length), " prompt lengths for ", sequences, " sequences");
  MAGA_CHECK(size(s.sequence_start) == sequences + 1 && s.sequence_start.front() == 0 && s.sequence_start.back() == tokens,
             "sequence_start does not span ", tokens, " tokens of ", sequences, " sequences");
  MAGA_CHECK(size(s.page_start) == sequences + 1 && s.page_start.front() == 0 && s.page_start.back() == size(s.pages),
             "page_start does not span ", size(s.pages), " pages of ", sequences, " sequences");
  for (int64_t i = 0; i < sequences; ++i) {
    const int64_t fresh = s.sequence_start[i + 1] - s.sequence_start[i], pages = s.page_start[i + 1] - s.page_start[i];
    MAGA_CHECK(fresh >= 0 && pages >= 0, "sequence ", i, " has ", fresh, " tokens and ", pages, " pages");
    MAGA_CHECK(fresh <= s.kv_length[i] && (page_bytes_ == 0 || s.kv_length[i] <= pages * limits_.page_tokens), "sequence ", i,
               " brings ", fresh, " tokens to a K/V length of ", s.kv_length[i], " in ", pages, " pages");
  }
  for (const int32_t page : s.pages) MAGA_CHECK(page >= 0 && page < limits_.pages, "page ", page, " of ", limits_.pages);
  for (const int32_t id : s.ids) MAGA_CHECK(id >= 0 && id < vocab_, "token id ", id, " with a vocabulary of ", vocab_);
  int64_t previous = -1;
  for (const int32_t row : s.logit_rows) {
    MAGA_CHECK(row > previous && row < tokens, "logit row ", row, " after ", previous, " of ", tokens, " tokens");
    previous = row;
  }
}

void Batch::bind(const Step& step) {
  check(step);
  step_ = step;
  slots_.clear();
  if (page_bytes_ == 0) return;
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
