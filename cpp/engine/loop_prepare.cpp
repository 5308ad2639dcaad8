// From the queues to a step that is ready to run: plan, admit and preempt, take pages, build.
#include <algorithm>
#include <utility>

#include "core/check.h"
#include "engine/loop.h"

namespace maga {

// Fills `next` and builder_. Returns false if there is nothing to run; the step in flight, if any, may have been finished.
bool Loop::prepare(StepInFlight* next) {
  settle_masks();
  begin_long_anew();
  if (nobody_left()) return false;
  const Plan* plan = &this->plan();
  if (in_flight_ > 0 && (plan->empty() || !plan->preempted.empty())) {
    finish();
    if (nobody_left()) return false;
    plan = &this->plan();
  }
  if (plan->empty() && std::any_of(running_.begin(), running_.end(), [](const auto& s) { return s->waits_for_mask; })) {
    wait_for_a_mask();
    return false;
  }
  while (plan->empty() && park_a_beam()) plan = &this->plan();
  MAGA_CHECK(!plan->empty(), "nothing can run: ", running_.size(), " sequences run, ", waiting_.size(), " wait, ",
             cache_.available(), " pages are left");
  apply(*plan, next);
  build(next);
  return !builder_.empty();
}

// Sequences that have grown long wait again: all their keys are to be others.
void Loop::begin_long_anew() {
  const auto grows = [](const auto& sequence) { return !sequence->over() && sequence->grows_long(); };
  if (std::none_of(running_.begin(), running_.end(), grows)) return;
  while (in_flight_ > 0) finish();
  for (auto at = running_.begin(); (at = std::find_if(running_.begin(), running_.end(), grows)) != running_.end();) {
    (*at)->is_long = true;
    preempt(at->get());
  }
}

const Plan& Loop::plan() {
  const PlanRules& rules = scheduler_.rules();
  int64_t slots = 0, tokens = 0;
  running_view_.clear();
  for (const auto& s : running_) {
    const PlanSequence& seen = running_view_.emplace_back(view(*s));
    slots += seen.slots;
    tokens += seen.known - seen.computed;
  }
  // Looking into the prefix cache costs a pass over the prompt, so only for those that this plan has room for.
  waiting_view_.clear();
  for (const auto& s : waiting_) {
    slots += s->slots();
    if (slots > rules.max_sequences || tokens >= rules.token_budget) break;
    auto match = cache_.peek(s->salt(), behind_pinned(s->matchable()));
    int64_t computed = (pinned_full_ + match.pages) * rules.page_tokens;
    if (computed < pinned_tokens_) computed = pinned_tokens_, ++match.unheld;  // the last page is copied
    waiting_view_.push_back({.known = s->known(),
                             .computed = computed,
                             .pages = {},
                             .unheld = match.unheld,
                             .slots = s->slots(),
                             .whole = s->request->whole_tokens,
                             .scored = s->unscored()});
    tokens += s->known() - computed;
  }
  return scheduler_.plan({.running = running_view_,
                          .waiting = waiting_view_,
                          .references = cache_.pool().references(),
                          .available = cache_.available()});
}

// A running sequence as the plan sees it. One whose last token is in flight needs nothing any more, not even its row.
PlanSequence Loop::view(const Sequence& sequence) const {
  const int64_t output_tokens = sequence.output_tokens() + sequence.pending;
  const bool last_is_coming = sequence.pending > 0 && (output_tokens >= sequence.request->request.params.max_new_tokens ||
                                                       sequence.coming() >= max_sequence_length_);
  return {.known = last_is_coming || sequence.waits_for_mask ? sequence.computed : sequence.coming(),
          .computed = sequence.computed,
          .pages = sequence.pages,
          .slots = last_is_coming ? 0 : sequence.slots(),
          .whole = sequence.request->whole_tokens,
          .scored = sequence.unscored()};
}

void Loop::apply(const Plan& plan, StepInFlight* next) {
  auto& entries = next->entries;
  for (const auto& run : plan.running) entries.push_back({.sequence = running_[run.sequence].get(), .tokens = run.tokens});
  for (const int32_t victim : plan.preempted) preempt(running_[victim].get());
  if (plan.reject_first) {
    Sequence& first = *waiting_.front();
    news.end(&first, FinishReason::error,
             concat("a sequence of ", first.known(), " tokens can never fit into the K/V cache of ", scheduler_.rules().total_pages,
                    " pages of ", scheduler_.rules().page_tokens, " tokens"));
  }
  // All of them are where fail() finds them before anything may throw.
  for (const auto& run : plan.admitted) entries.push_back({.sequence = waiting_[run.sequence].get(), .tokens = run.tokens});
  for (size_t i = 0; i < plan.admitted.size(); ++i) insert(&running_, std::move(waiting_[i]));
  waiting_.erase(waiting_.begin(), waiting_.begin() + plan.admitted.size());
  for (const Entry& entry : std::span(entries).last(plan.admitted.size())) admit(entry.sequence);

  size_t kept = 0;
  for (const Entry& entry : entries) {
    if (take_pages(entry.sequence, entry.tokens))
      entries[kept++] = entry;
    else if (entry.sequence->in_flight == 0)  // else it is left out of this step
      preempt(entry.sequence);
  }
  entries.resize(kept);
}

// Of a sequence that is in running_ already.
void Loop::admit(Sequence* sequence) {
  fault_.act(Fault::Place::admit);
  AcceptedRequest& request = *sequence->request;
  auto& pages = sequence->pages;
  pages.assign(pinned_.begin(), pinned_.begin() + pinned_full_);
  for (const int32_t page : pages) cache_.hold(page);
  sequence->cached = cache_.match(sequence->salt(), behind_pinned(sequence->matchable()), &pages);
  sequence->computed = static_cast<int64_t>(pages.size()) * cache_.page_tokens();
  if (sequence->computed < pinned_tokens_) {
    cache_.hold(pages.emplace_back(pinned_.back()));
    sequence->computed = pinned_tokens_;
  }
  if (news.mark_started(&request)) {
    request.wait_seconds = seconds_between(request.submitted, Clock::now());
    request.cached_tokens = std::max<int64_t>(0, sequence->computed - request.prefix);
    stats_.prompt_tokens += sequence->known() - request.prefix;
    stats_.cached_tokens += request.cached_tokens;
    if (has_penalty(request.request.params)) sequence->counts.add_prompt(std::span(request.request.prompt).subspan(request.prefix));
  }
}

// Gives back all pages; what has been generated stays and is computed again later, as far as the prefix cache has lost it.
// Not while a step in flight has it: prepare() finishes that step before a plan that preempts.
void Loop::preempt(Sequence* sequence) {
  MAGA_CHECK(sequence->in_flight == 0, "a sequence in flight cannot lose its pages");
  cache_.release(sequence->pages);
  sequence->pages.clear();
  sequence->computed = 0;
  sequence->cached = {};
  ++stats_.preemptions;
  const auto at = std::find_if(running_.begin(), running_.end(), [&](const auto& s) { return s.get() == sequence; });
  insert(sequence->chosen ? &parked_ : &waiting_, std::move(*at));
  running_.erase(at);
}

// Where beams that have chosen hold the pages that another one of theirs waits for, the last of them gives up its own: how it may
// go on is known. Returns whether there was one.
bool Loop::park_a_beam() {
  if (in_flight_ > 0) return false;
  const auto last = std::find_if(running_.rbegin(), running_.rend(), [](const auto& sequence) { return sequence->chosen; });
  if (last == running_.rend()) return false;
  preempt(last->get());
  return true;
}

// Takes the first pages, which hold the prefix, out of circulation.
void Loop::pin(const EngineOptions& options) {
  pinned_tokens_ = static_cast<int64_t>(options.prefix.size());
  pinned_full_ = pinned_tokens_ / cache_.page_tokens();
  for (int64_t i = 0; i < cache_.pages_for(pinned_tokens_); ++i) {
    const int32_t page = cache_.allocate();
    MAGA_REQUIRE(page == i, "a prefix of ", pinned_tokens_, " tokens does not fit into the K/V cache of ", cache_.pool().total(),
                 " pages of ", cache_.page_tokens(), " tokens");
    pinned_.push_back(page);
  }
}

std::span<const int32_t> Loop::behind_pinned(std::span<const int32_t> tokens) const {
  return tokens.subspan(std::min(tokens.size(), static_cast<size_t>(pinned_full_ * cache_.page_tokens())));
}

// Makes room for the next tokens: a page of its own where it would write into a shared one, and new pages behind. What was taken
// stays with the sequence if there is not enough.
bool Loop::take_pages(Sequence* sequence, int64_t tokens) {
  fault_.act(Fault::Place::allocate);
  auto& pages = sequence->pages;
  const size_t next = sequence->computed / cache_.page_tokens();
  const size_t wanted = cache_.pages_for(sequence->computed + tokens);
  pages.reserve(wanted);  // a page that is taken must find its place
  const auto allocate = [&] { return fault_.fires(Fault::Kind::no_pages, Fault::Place::allocate) ? kNoPage : cache_.allocate(); };
  if (next < pages.size() && cache_.pool().references(pages[next]) > 1) {
    const int32_t page = allocate();
    if (page == kNoPage) return false;
    const int32_t shared = std::exchange(pages[next], page);
    cache_.release({&shared, 1});
    model_->copy_page(shared, page);
  }
  while (pages.size() < wanted) {
    const int32_t page = allocate();
    if (page == kNoPage) return false;
    pages.push_back(page);
  }
  return true;
}

// Sequences that bring one token come first, so that a device can treat them apart from prompts.
void Loop::build(StepInFlight* next) {
  for (const bool one : {true, false})
    for (Entry& entry : next->entries) {
      if ((entry.tokens == 1) != one) continue;
      entry.end = entry.sequence->computed + entry.tokens;
      const StepBuilder::Rows rows = builder_.add(*entry.sequence, entry.tokens, cache_.page_tokens());
      entry.row = rows.last;
      entry.first_scored = rows.first;
      entry.scored = rows.scored;
      next->alone |= rows.scored > 0;
      if (entry.row >= 0) add_draws(next, &entry);
    }
}

// Leaves the choice of the next token to the device where it can make it.
void Loop::add_draws(StepInFlight* next, Entry* entry) {
  const Sequence& sequence = *entry->sequence;
  const SamplingParams& params = sequence.request->request.params;
  const int64_t output_tokens = sequence.output_tokens() + sequence.pending;
  const bool on_host = !asynchronous_ || model_->program().embeds || sequence.allowed || needs_host(params, output_tokens);
  next->alone |= on_host || !sequence.siblings.empty();
  if (on_host) return;
  entry->first_draw = static_cast<int32_t>(next->draws.size());
  entry->draws = sequence.slots();
  Draw draw{.row = entry->row, .seed = sequence.request->seed, .index = static_cast<uint64_t>(output_tokens)};
  if (!is_greedy(params)) {
    draw.temperature = params.temperature;
    draw.top_k = params.top_k;
    draw.top_p = top_p_behind(params, output_tokens);
    draw.min_p = params.min_p;
  }
  for (int32_t i = 0; i < entry->draws; ++i) {
    draw.stream = static_cast<uint64_t>(sequence.output_at(i));
    next->draws.push_back(draw);
  }
}

}  // namespace maga
