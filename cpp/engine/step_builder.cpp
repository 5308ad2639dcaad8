// Ragged arrays, sequence after sequence.
#include "engine/step_builder.h"

#include <algorithm>

namespace maga {

StepBuilder::StepBuilder(const Limits& limits) {
  for (auto* by_token : {&ids_, &positions_, &block_positions_}) by_token->reserve(limits.tokens);
  for (auto* by_sequence : {&sequence_start_, &kv_length_, &prompt_length_, &page_start_, &context_})
    by_sequence->reserve(limits.sequences + 1);
  logit_rows_.reserve(limits.logit_rows);
  pages_.reserve(limits.pages);
  clear();
}

void StepBuilder::clear() {
  for (auto* array : {&ids_, &positions_, &sequence_start_, &kv_length_, &prompt_length_, &page_start_, &pages_, &logit_rows_,
                      &context_, &block_positions_})
    array->clear();
  brings_context_ = false;
  sequence_start_.push_back(0);
  page_start_.push_back(0);
}

StepBuilder::Rows StepBuilder::add(const Sequence& sequence, int64_t tokens, int64_t page_tokens) {
  const Request& request = sequence.request->request;
  const int64_t end = sequence.computed + tokens, context = sequence.request->context, unplaced = sequence.request->unplaced;
  for (int64_t i = sequence.computed; i < end; ++i) {
    ids_.push_back(i < sequence.known() ? sequence.tokens[i] : -1 - sequence.draw);
    const int64_t shift = i >= request.segment_start ? request.segment_shift : 0;
    positions_.push_back(
        static_cast<int32_t>(context == 0 || i < context ? i - unplaced + shift : sequence.request->held_position));
    block_positions_.push_back(static_cast<int32_t>(context == 0 || i < context ? 0 : i - context + 1));
  }
  context_.push_back(static_cast<int32_t>(context));
  brings_context_ |= sequence.computed < context;
  const int64_t pages = (end + page_tokens - 1) / page_tokens;
  pages_.insert(pages_.end(), sequence.pages.begin(), sequence.pages.begin() + pages);
  sequence_start_.push_back(static_cast<int32_t>(ids_.size()));
  page_start_.push_back(static_cast<int32_t>(pages_.size()));
  kv_length_.push_back(static_cast<int32_t>(end));
  const int64_t prompt = sequence.prompt_tokens() - unplaced;
  prompt_length_.push_back(static_cast<int32_t>(sequence.is_long ? std::max(prompt, sequence.request->long_from) : prompt));

  const auto tokens_before = static_cast<int32_t>(ids_.size() - tokens);
  Rows rows{.first = static_cast<int32_t>(logit_rows_.size())};
  const int64_t scored_end = std::min(end, sequence.scored + sequence.unscored());
  for (int64_t i = std::max(sequence.scored, sequence.computed); i < scored_end; ++i, ++rows.scored)
    logit_rows_.push_back(tokens_before + static_cast<int32_t>(i - sequence.computed));
  if (end < sequence.coming()) return rows;
  rows.last = static_cast<int32_t>(logit_rows_.size());
  for (int64_t i = sequence.request->row_per_token ? tokens : 1; i > 0; --i)
    logit_rows_.push_back(static_cast<int32_t>(static_cast<int64_t>(ids_.size()) - i));
  return rows;
}

Step StepBuilder::step() const {
  return {.ids = ids_,
          .positions = positions_,
          .sequence_start = sequence_start_,
          .kv_length = kv_length_,
          .prompt_length = prompt_length_,
          .page_start = page_start_,
          .pages = pages_,
          .logit_rows = logit_rows_,
          .tree = {},
          .context = brings_context_ ? std::span<const int32_t>(context_) : std::span<const int32_t>(),
          .block_positions = block_positions_};
}

}  // namespace maga
