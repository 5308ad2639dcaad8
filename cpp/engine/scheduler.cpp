// Two passes over the running sequences (decodes, prompts), then admission of the waiting ones.
#include "engine/scheduler.h"

#include <algorithm>

namespace maga {
namespace {

constexpr int64_t kPreempted = -1;

}  // namespace

Scheduler::Scheduler(const PlanRules& rules) : rules_(rules), dropped_(rules.total_pages, 0) {}

const Plan& Scheduler::plan(const PlanInput& input) {
  input_ = &input;
  plan_.running.clear();
  plan_.admitted.clear();
  plan_.preempted.clear();
  plan_.reject_first = false;
  budget_ = rules_.token_budget;
  rows_ = rules_.logit_rows;
  available_ = input.available;
  granted_.assign(input.running.size(), 0);

  const auto uncomputed = [&](size_t i) { return input.running[i].known - input.running[i].computed; };
  for (size_t i = 0; i < input.running.size(); ++i)
    if (uncomputed(i) == 1) grant(i, 1);
  for (size_t i = 0; i < input.running.size(); ++i)
    if (uncomputed(i) > 1) grant(i, uncomputed(i));
  if (plan_.preempted.empty()) admit();

  if (!plan_.preempted.empty()) std::fill(dropped_.begin(), dropped_.end(), 0);
  for (const auto& run : plan_.running)  // a granted copy leaves a mark too
    for (const int32_t page : input.running[run.sequence].pages) dropped_[page] = 0;
  return plan_;
}

// Gives a running sequence as many of the wanted tokens as budget and pages allow. Only if that is none, others lose their pages.
void Scheduler::grant(int64_t i, int64_t wanted) {
  const PlanSequence& sequence = input_->running[i];
  wanted = within_rows(sequence, std::min(wanted, budget_));
  if (granted_[i] == kPreempted || wanted == 0) return;
  int64_t tokens = tokens_that_fit(sequence, wanted);
  while (tokens == 0 && preempt_after(i)) tokens = tokens_that_fit(sequence, wanted);
  if (tokens == 0) return;  // it keeps its pages and waits for those before it to end

  const int64_t held = static_cast<int64_t>(sequence.pages.size());
  available_ -= std::max<int64_t>(0, pages_for(sequence.computed + tokens) - held);
  if (must_copy(sequence)) {
    --available_;
    ++dropped_[sequence.pages[sequence.computed / rules_.page_tokens]];
  }
  take_budget(sequence, tokens);
  granted_[i] = tokens;
  plan_.running.push_back({static_cast<int32_t>(i), tokens});
}

// As many of the next tokens as there are rows of logits left for. Decodes come first and every sequence that runs has a row of
// its own among logit_rows, so one that is scored gets on by a row a step at least.
int64_t Scheduler::within_rows(const PlanSequence& sequence, int64_t tokens) const {
  const int64_t without_row = std::max<int64_t>(0, sequence.known - 1 - sequence.scored - sequence.computed);
  return std::min(tokens, without_row + rows_);
}

void Scheduler::take_budget(const PlanSequence& sequence, int64_t tokens) {
  const int64_t without_row = std::max<int64_t>(0, sequence.known - 1 - sequence.scored - sequence.computed);
  budget_ -= tokens;
  rows_ -= std::max<int64_t>(0, tokens - without_row);
}

int64_t Scheduler::tokens_that_fit(const PlanSequence& sequence, int64_t wanted) const {
  const int64_t pages = available_ - must_copy(sequence);
  if (pages < 0) return 0;
  const int64_t room = (static_cast<int64_t>(sequence.pages.size()) + pages) * rules_.page_tokens - sequence.computed;
  const int64_t tokens = std::min(wanted, room);
  return sequence.computed + tokens < sequence.whole ? 0 : tokens;
}

// Whether the page that the next token goes into belongs to others too.
bool Scheduler::must_copy(const PlanSequence& sequence) const {
  const size_t next = sequence.computed / rules_.page_tokens;
  if (next >= sequence.pages.size()) return false;
  const int32_t page = sequence.pages[next];
  return input_->references[page] - dropped_[page] > 1;
}

// Takes the pages of the last sequence after `i` that has no tokens in this plan.
bool Scheduler::preempt_after(int64_t i) {
  for (int64_t victim = static_cast<int64_t>(granted_.size()) - 1; victim > i; --victim) {
    if (granted_[victim] != 0) continue;
    granted_[victim] = kPreempted;
    plan_.preempted.push_back(static_cast<int32_t>(victim));
    for (const int32_t page : input_->running[victim].pages)
      if (input_->references[page] - ++dropped_[page] == 0) ++available_;
    return true;
  }
  return false;
}

void Scheduler::admit() {
  // Pages that the running sequences are about to need, so that no newcomer is admitted only to be preempted.
  int64_t reserved = 0, slots = 0;
  for (size_t i = 0; i < input_->running.size(); ++i) {
    const PlanSequence& sequence = input_->running[i];
    const int64_t held = std::max<int64_t>(static_cast<int64_t>(sequence.pages.size()), pages_for(sequence.computed + granted_[i]));
    reserved += std::max<int64_t>(0, pages_for(sequence.known + 1) - held);
    slots += sequence.slots;
  }
  for (size_t i = 0; i < input_->waiting.size(); ++i) {
    const PlanSequence& sequence = input_->waiting[i];
    const int64_t tokens = within_rows(sequence, std::min(budget_, sequence.known - sequence.computed));
    if (tokens <= 0 || sequence.computed + tokens < sequence.whole || slots + sequence.slots > rules_.max_sequences) return;
    const int64_t all = pages_for(sequence.known + 1);
    const int64_t needed = all - pages_for(sequence.computed) + sequence.unheld;
    if (needed + reserved > available_) {
      plan_.reject_first = i == 0 && all > rules_.total_pages;
      return;
    }
    available_ -= needed;
    slots += sequence.slots;
    take_budget(sequence, tokens);
    plan_.admitted.push_back({static_cast<int32_t>(i), tokens});
  }
}

}  // namespace maga
