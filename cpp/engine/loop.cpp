#include "engine/loop.h"

#include <algorithm>
#include <atomic>
#include <limits>

#include "core/check.h"
#include "core/threads.h"

namespace maga {
namespace {

double unix_seconds() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

// Adds the time of its scope to a figure.
class Stopwatch {
 public:
  explicit Stopwatch(double* seconds) : seconds_(seconds), begin_(Clock::now()) {}
  ~Stopwatch() { *seconds_ += seconds_between(begin_, Clock::now()); }

 private:
  double* seconds_;
  Clock::time_point begin_;
};

}  // namespace

int64_t longest_sequence(const EngineOptions& options, const Executable& model) {
  const Limits& limits = model.limits();
  const int64_t wanted = options.max_sequence_length > 0 ? options.max_sequence_length : model.program().max_positions;
  const int64_t pool = limits.pages * limits.page_tokens;
  return wanted > 0 ? std::min(wanted, pool) : pool;
}

Loop::Loop(std::shared_ptr<Backend> backend, std::unique_ptr<Executable> model, const EngineOptions& options)
    : backend_(std::move(backend)),
      model_(std::move(model)),
      max_sequence_length_(longest_sequence(options, *model_)),
      fault_(options.fault),
      cache_(model_->limits().pages, model_->limits().page_tokens, options.prefix_cache),
      scheduler_({.token_budget = options.token_budget,
                  .max_sequences = options.max_sequences,
                  .page_tokens = model_->limits().page_tokens,
                  .total_pages = model_->limits().pages}),
      builder_(options.token_budget, options.max_sequences, model_->limits().pages),
      scratch_(backend_->threads().size()) {}

void Loop::insert(Queue* queue, std::unique_ptr<Sequence> sequence) {
  const auto at =
      std::upper_bound(queue->begin(), queue->end(), sequence, [](const auto& a, const auto& b) { return a->runs_before(*b); });
  queue->insert(at, std::move(sequence));
}

void Loop::add(std::shared_ptr<AcceptedRequest> request) {
  const int outputs = request->request.sequences;
  request->unfinished = outputs;
  auto sequence = std::make_unique<Sequence>(std::move(request));
  for (int32_t i = 1; i < outputs; ++i) sequence->siblings.push_back(i);
  insert(&waiting_, std::move(sequence));
}

void Loop::cancel(uint64_t request, int32_t index) {
  for (Queue* queue : {&running_, &waiting_})
    for (const auto& sequence : *queue) {
      if (sequence->ended || sequence->request->id != request) continue;
      if (index < 0)
        news.end(sequence.get(), FinishReason::cancelled);
      else
        news.end_output(sequence.get(), index, FinishReason::cancelled);
    }
  remove_ended();
}

void Loop::cancel_all() {
  for (Queue* queue : {&running_, &waiting_})
    for (const auto& sequence : *queue) news.end(sequence.get(), FinishReason::cancelled);
  remove_ended();
}

void Loop::step() {
  double total = 0;
  const double elsewhere = stats_.model_seconds + stats_.sample_seconds;
  {
    const Stopwatch watch(&total);
    scheduled_.clear();
    builder_.clear();
    try {
      expire();
      if (!idle()) apply(plan());
      if (!builder_.empty()) {
        ++stats_.steps;
        forward();
        sample();
        commit();
      }
    } catch (const std::exception& error) {
      fail_step(error.what());
    }
    remove_ended();
  }
  stats_.host_seconds += total - (stats_.model_seconds + stats_.sample_seconds - elsewhere);
  stats_.last_step_unix = unix_seconds();
}

void Loop::expire() {
  const auto now = Clock::now();
  for (Queue* queue : {&running_, &waiting_})
    for (const auto& sequence : *queue)
      if (sequence->request->deadline <= now) news.end(sequence.get(), FinishReason::timeout);
  remove_ended();
}

const Plan& Loop::plan() {
  const PlanRules& rules = scheduler_.rules();
  int64_t slots = 0, tokens = 0;
  running_view_.clear();
  for (const auto& s : running_) {
    running_view_.push_back({.known = s->known(), .computed = s->computed, .pages = s->pages, .slots = s->slots()});
    slots += s->slots();
    tokens += s->known() - s->computed;
  }
  // Looking into the prefix cache costs a pass over the prompt, so only for those that this plan has room for.
  waiting_view_.clear();
  for (const auto& s : waiting_) {
    slots += s->slots();
    if (slots > rules.max_sequences || tokens >= rules.token_budget) break;
    const auto match = cache_.peek(s->request->salt, s->matchable());
    const int64_t computed = match.pages * rules.page_tokens;
    waiting_view_.push_back({.known = s->known(), .computed = computed, .pages = {}, .unheld = match.unheld, .slots = s->slots()});
    tokens += s->known() - computed;
  }
  return scheduler_.plan({.running = running_view_,
                          .waiting = waiting_view_,
                          .references = cache_.pool().references(),
                          .available = cache_.available()});
}

void Loop::apply(const Plan& plan) {
  MAGA_CHECK(!plan.empty(), "nothing can run: ", running_.size(), " sequences run, ", waiting_.size(), " wait, ",
             cache_.available(), " pages are left");
  for (const auto& run : plan.running) scheduled_.push_back({.sequence = running_[run.sequence].get(), .tokens = run.tokens});
  for (const int32_t victim : plan.preempted) preempt(running_[victim].get());
  if (plan.reject_first) {
    Sequence& first = *waiting_.front();
    news.end(&first, FinishReason::error,
             concat("a sequence of ", first.known(), " tokens can never fit into the K/V cache of ", scheduler_.rules().total_pages,
                    " pages of ", scheduler_.rules().page_tokens, " tokens"));
  }
  for (const auto& run : plan.admitted) scheduled_.push_back({.sequence = waiting_[run.sequence].get(), .tokens = run.tokens});
  for (size_t i = 0; i < plan.admitted.size(); ++i) admit(std::move(waiting_[i]));
  waiting_.erase(waiting_.begin(), waiting_.begin() + plan.admitted.size());

  const int64_t page_tokens = cache_.page_tokens();
  size_t kept = 0;
  for (Scheduled& scheduled : scheduled_) {
    if (!take_pages(scheduled.sequence, scheduled.tokens)) {
      preempt(scheduled.sequence);
      continue;
    }
    scheduled.row = builder_.add(*scheduled.sequence, scheduled.tokens, page_tokens);
    scheduled_[kept++] = scheduled;
  }
  scheduled_.resize(kept);
}

void Loop::admit(std::unique_ptr<Sequence> sequence) {
  AcceptedRequest& request = *sequence->request;
  sequence->cached = cache_.match(request.salt, sequence->matchable(), &sequence->pages);
  sequence->computed = sequence->cached.pages * cache_.page_tokens();
  if (news.mark_started(&request)) {
    request.wait_seconds = seconds_between(request.submitted, Clock::now());
    request.cached_tokens = sequence->computed;
    stats_.prompt_tokens += sequence->known();
    stats_.cached_tokens += request.cached_tokens;
    if (has_penalty(request.request.params)) sequence->counts.add_prompt(request.request.prompt);
  }
  insert(&running_, std::move(sequence));
}

// Gives back all pages; what has been generated stays and is computed again later, as far as the prefix cache has lost it.
void Loop::preempt(Sequence* sequence) {
  cache_.release(sequence->pages);
  sequence->pages.clear();
  sequence->computed = 0;
  sequence->cached = {};
  ++stats_.preemptions;
  const auto at = std::find_if(running_.begin(), running_.end(), [&](const auto& s) { return s.get() == sequence; });
  insert(&waiting_, std::move(*at));
  running_.erase(at);
}

// Makes room for the next tokens: a page of its own where it would write into a shared one, and new pages behind. What was taken
// stays with the sequence if there is not enough.
bool Loop::take_pages(Sequence* sequence, int64_t tokens) {
  fault_.act(Fault::Place::allocate);
  auto& pages = sequence->pages;
  const size_t next = sequence->computed / cache_.page_tokens();
  const size_t wanted = cache_.pages_for(sequence->computed + tokens);
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

void Loop::forward() {
  const Stopwatch watch(&stats_.model_seconds);
  fault_.act(Fault::Place::forward);
  model_->run(builder_.step());
}

void Loop::sample() {
  const Stopwatch watch(&stats_.sample_seconds);
  fault_.act(Fault::Place::sample);
  const auto logits = model_->logits();
  const int64_t vocab = model_->program().vocab;
  used_draws_ = 0;
  for (Scheduled& scheduled : scheduled_) {
    if (scheduled.row < 0) continue;
    const Sequence& sequence = *scheduled.sequence;
    scheduled.first_draw = static_cast<int32_t>(used_draws_);
    for (int32_t i = 0; i < sequence.slots(); ++i) {
      if (used_draws_ == draws_.size()) draws_.emplace_back();
      draws_[used_draws_++].input = {
          .logits = logits.subspan(scheduled.row * vocab, vocab),
          .params = &sequence.request->request.params,
          .counts = &sequence.counts,
          .tokens = sequence.tokens,
          .output_tokens = sequence.output_tokens(),
          .seed = sequence.request->seed,
          .stream = static_cast<uint64_t>(i == 0 ? sequence.index : sequence.siblings[i - 1]),
      };
    }
  }
  if (used_draws_ > 0 && fault_.fires(Fault::Kind::nan, Fault::Place::forward)) {
    nan_row_.assign(vocab, std::numeric_limits<float>::quiet_NaN());
    const Row first = draws_.front().input.logits;
    for (size_t i = 0; i < used_draws_; ++i)
      if (draws_[i].input.logits.data() == first.data()) draws_[i].input.logits = nan_row_;
  }
  std::atomic<bool> failed{false};
  backend_->threads().parallel_for(static_cast<int64_t>(used_draws_), 1, [&](int64_t begin, int64_t end, int thread) {
    try {
      for (int64_t i = begin; i < end; ++i) maga::sample(draws_[i].input, &scratch_[thread], &draws_[i].result);
    } catch (const std::exception&) {  // a thread of the pool must not throw
      failed = true;
    }
  });
  MAGA_CHECK(!failed, "choosing the tokens failed");
}

void Loop::commit() {
  for (const Scheduled& scheduled : scheduled_) {
    Sequence* sequence = scheduled.sequence;
    sequence->computed += scheduled.tokens;
    ++sequence->steps;
    Draw* draws = draws_.data() + scheduled.first_draw;
    if (scheduled.row >= 0 && draws->result.status == Sampled::Status::non_finite) {
      cache_.forget(sequence->pages);
      news.end(sequence, FinishReason::error, "non-finite logits");
      continue;
    }
    const int64_t cacheable = std::min(sequence->computed, sequence->request->cacheable_tokens);
    cache_.insert(sequence->request->salt, std::span(sequence->tokens).first(cacheable), sequence->pages, &sequence->cached);
    if (scheduled.row < 0) continue;
    if (!sequence->siblings.empty()) fork(sequence, scheduled);
    append(sequence, draws);
  }
}

// The prompt is computed: every other output gets a sequence of its own that shares all pages, the partial one too.
void Loop::fork(Sequence* sequence, const Scheduled& scheduled) {
  std::vector<int32_t> siblings;
  siblings.swap(sequence->siblings);
  for (size_t i = 0; i < siblings.size(); ++i) {
    auto copy = std::make_unique<Sequence>(*sequence);
    copy->index = siblings[i];
    for (const int32_t page : copy->pages) cache_.hold(page);
    append(copy.get(), &draws_[scheduled.first_draw + 1 + i]);
    insert(&running_, std::move(copy));
  }
}

void Loop::append(Sequence* sequence, Draw* draw) {
  AcceptedRequest& request = *sequence->request;
  const SamplingParams& params = request.request.params;
  if (draw->result.status == Sampled::Status::no_token)
    return news.end(sequence, FinishReason::error,
                    "no token can be chosen: penalties, logit_bias, bad_words and min_new_tokens leave none");

  const int32_t token = draw->result.token;
  sequence->tokens.push_back(token);
  if (has_penalty(params)) sequence->counts.add_output(token);
  if (sequence->output_tokens() == 1) sequence->first_token_seconds = seconds_between(request.submitted, Clock::now());
  ++stats_.output_tokens;

  const StopMatch match = sequence->stop.append(sequence->output());
  FinishReason finish = FinishReason::none;
  if (match)
    finish = FinishReason::stop;
  else if (sequence->output_tokens() >= params.max_new_tokens || sequence->known() >= max_sequence_length_)
    finish = FinishReason::length;

  if (params.logprobs >= 0) sequence->cumulative_logprob += draw->result.logprobs.logprob;
  Event& event = news.report(*sequence, sequence->index);
  event.tokens.push_back(token);
  if (params.logprobs >= 0) event.logprobs.push_back(std::move(draw->result.logprobs));
  event.finish = finish;
  event.stop_token = match.stop_token;
  event.stop_word = match.stop_word;
  event.stop_string = match.stop_string;
  if (finish == FinishReason::none) return;
  sequence->ended = true;
  news.count_end(&request, finish);
}

// The step threw. What it computed is unknown, so its sequences end; should it have thrown before choosing any, all of them do,
// since otherwise the next step would throw again.
void Loop::fail_step(const std::string& error) {
  const std::string text = concat("the step failed: ", error);
  for (const Scheduled& scheduled : scheduled_) news.end(scheduled.sequence, FinishReason::error, text);
  if (scheduled_.empty())
    for (Queue* queue : {&running_, &waiting_})
      for (const auto& sequence : *queue) news.end(sequence.get(), FinishReason::error, text);
}

void Loop::remove_ended() {
  for (Queue* queue : {&running_, &waiting_})
    std::erase_if(*queue, [&](const auto& sequence) {
      if (sequence->ended) cache_.release(sequence->pages);
      return sequence->ended;
    });
}

const EngineStats& Loop::stats() {
  stats_.running = stats_.waiting = 0;
  for (const auto& sequence : running_) stats_.running += sequence->slots();
  for (const auto& sequence : waiting_) stats_.waiting += sequence->slots();
  stats_.finished = news.finished;
  stats_.cancelled = news.cancelled;
  stats_.failed = news.failed;
  stats_.pages_total = cache_.pool().total();
  stats_.pages_cached = cache_.cached();
  stats_.pages_free = cache_.pool().free();
  stats_.pages_live = stats_.pages_total - stats_.pages_cached - stats_.pages_free;
  return stats_;
}

}  // namespace maga
