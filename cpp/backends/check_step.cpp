#include "backends/check_step.h"

namespace maga {

void check_step(const Step& s, const Limits& limits, const StepBounds& bounds, int64_t earlier_draws) {
  const int64_t tokens = s.tokens(), sequences = s.sequences();
  const auto size = [](const auto& span) { return static_cast<int64_t>(span.size()); };
  MAGA_CHECK(tokens <= limits.tokens, tokens, " tokens, limit ", limits.tokens);
  MAGA_CHECK(sequences <= limits.sequences, sequences, " sequences, limit ", limits.sequences);
  MAGA_CHECK(size(s.logit_rows) <= limits.logit_rows, size(s.logit_rows), " rows of logits, limit ", limits.logit_rows);
  MAGA_CHECK(size(s.positions) == tokens, size(s.positions), " positions for ", tokens, " tokens");
  MAGA_CHECK(size(s.prompt_length) == sequences, size(s.prompt_length), " prompt lengths for ", sequences, " sequences");
  MAGA_CHECK(size(s.sequence_start) == sequences + 1 && s.sequence_start.front() == 0 && s.sequence_start.back() == tokens,
             "sequence_start does not span ", tokens, " tokens of ", sequences, " sequences");
  MAGA_CHECK(size(s.page_start) == sequences + 1 && s.page_start.front() == 0 && s.page_start.back() == size(s.pages),
             "page_start does not span ", size(s.pages), " pages of ", sequences, " sequences");
  for (int64_t i = 0; i < sequences; ++i) {
    const int64_t fresh = s.sequence_start[i + 1] - s.sequence_start[i], pages = s.page_start[i + 1] - s.page_start[i];
    MAGA_CHECK(fresh >= 0 && pages >= 0, "sequence ", i, " has ", fresh, " tokens and ", pages, " pages");
    MAGA_CHECK(fresh <= s.kv_length[i] && (!bounds.keeps_kv || s.kv_length[i] <= pages * limits.page_tokens), "sequence ", i,
               " brings ", fresh, " tokens to a K/V length of ", s.kv_length[i], " in ", pages, " pages");
  }
  for (const int32_t page : s.pages) MAGA_CHECK(page >= 0 && page < limits.pages, "page ", page, " of ", limits.pages);
  for (const int32_t id : s.ids)
    MAGA_CHECK(id >= -earlier_draws && id < bounds.vocab, "token id ", id, " with a vocabulary of ", bounds.vocab, " and ",
               earlier_draws, " draws before");
  for (int64_t i = 0; bounds.positions > 0 && i < tokens; ++i)
    MAGA_CHECK(s.positions[i] >= 0 && s.positions[i] < bounds.positions, "position ", s.positions[i], " of ", bounds.positions);
  MAGA_CHECK(size(s.block_positions) == tokens || (s.block_positions.empty() && !bounds.by_block), size(s.block_positions),
             " block positions for ", tokens, " tokens");
  MAGA_CHECK(s.context.empty() || size(s.context) == sequences, size(s.context), " contexts for ", sequences, " sequences");
  for (int64_t i = 0; !s.context.empty() && i < sequences; ++i)
    MAGA_CHECK(s.context[i] >= 0 && s.context[i] <= s.kv_length[i], "a context of ", s.context[i], " tokens at a K/V length of ",
               s.kv_length[i]);
  MAGA_CHECK(s.tree.empty() || size(s.tree) == tokens, size(s.tree), " tree masks for ", tokens, " tokens");
  for (int64_t i = 0; !s.tree.empty() && i < sequences; ++i) {
    const int64_t begin = s.sequence_start[i], fresh = s.sequence_start[i + 1] - begin;
    MAGA_CHECK(fresh <= 64, "a tree of ", fresh, " tokens, at most 64 fit");
    for (int64_t t = 0; t < fresh; ++t)
      MAGA_CHECK((s.tree[begin + t] >> t & 1) && (fresh == 64 || s.tree[begin + t] >> fresh == 0), "token ", t,
                 " of a tree does not see itself, or sees tokens that are not there");
  }
  int64_t previous = -1;
  for (const int32_t row : s.logit_rows) {
    MAGA_CHECK(row > previous && row < tokens, "logit row ", row, " after ", previous, " of ", tokens, " tokens");
    previous = row;
  }
}

}  // namespace maga
