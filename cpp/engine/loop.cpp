// The doors, the order of the phases, and the launch. loop_prepare.cpp and loop_finish.cpp have the phases before and after it.
#include "engine/loop.h"

#include <algorithm>
#include <utility>

#include "core/threads.h"

namespace maga {
namespace {

double unix_seconds() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

}  // namespace

int64_t longest_sequence(const EngineOptions& options, const Executable& model) {
  const Limits& limits = model.limits();
  const int64_t wanted = options.max_sequence_length > 0 ? options.max_sequence_length : model.program().max_positions;
  // No sequence has a page of its own for a pinned one that is not full.
  const int64_t unusable = options.prefix_in_pages && options.prefix.size() % limits.page_tokens != 0;
  const int64_t pool = (limits.pages - unusable) * limits.page_tokens;
  return wanted > 0 ? std::min(wanted, pool) : pool;
}

View hidden_state(const Program& program) {
  for (const Op& op : program.ops)
    if (const auto* head = std::get_if<Linear>(&op); head && head->out.value == program.logits) return head->in;
  return {};
}

Loop::Loop(std::shared_ptr<Backend> backend, std::unique_ptr<Executable> model, const EngineOptions& options)
    : backend_(std::move(backend)),
      model_(std::move(model)),
      asynchronous_(model_->asynchronous()),
      max_sequence_length_(longest_sequence(options, *model_)),
      hidden_state_(hidden_state(model_->program())),
      rates_(options.rates),
      weight_bytes_(options.weight_bytes),
      fault_(options.fault),
      cache_(model_->limits().pages, model_->limits().page_tokens, options.prefix_cache),
      scheduler_({.token_budget = options.token_budget,
                  .max_sequences = options.max_sequences,
                  .page_tokens = model_->limits().page_tokens,
                  .total_pages = model_->limits().pages,
                  .logit_rows = model_->limits().logit_rows}),
      builder_(model_->limits()),
      masks_(std::make_shared<MaskQueue>(model_->program().vocab)),
      scratch_(backend_->threads().size()) {
  for (StepInFlight& step : steps_) {
    step.entries.reserve(options.max_sequences);
    step.draws.reserve(options.max_sequences);
    step.forks.reserve(options.max_sequences);
  }
  running_.reserve(options.max_sequences);
  if (options.prefix_in_pages) pin(options);
}

void Loop::insert(Queue* queue, std::unique_ptr<Sequence> sequence) {
  const auto at =
      std::upper_bound(queue->begin(), queue->end(), sequence, [](const auto& a, const auto& b) { return a->runs_before(*b); });
  queue->insert(at, std::move(sequence));
}

void Loop::add(std::shared_ptr<AcceptedRequest> request) {
  const int outputs = request->request.sequences;
  request->unfinished = outputs;
  auto sequence = std::make_unique<Sequence>(std::move(request));
  const int32_t rows = sequence->request->beams ? sequence->request->beams->width() : outputs;
  for (int32_t i = 1; i < rows; ++i) sequence->siblings.push_back(i);
  Sequence& added = *sequence;
  insert(&waiting_, std::move(sequence));
  try {
    fault_.act(Fault::Place::admit);
    if (const uint64_t grammar = added.request->request.grammar) added.allowed = masks_->ask(grammar, 0, -1);
  } catch (const std::exception& error) {
    news.end(&added, FinishReason::error, concat("the request could not be taken in: ", error.what()));
    remove_ended();
  }
}

void Loop::cancel(uint64_t request, int32_t index) {
  for (Queue* queue : queues())
    for (const auto& sequence : *queue) {
      if (sequence->over() || sequence->request->id != request) continue;
      if (index < 0)
        news.end(sequence.get(), FinishReason::cancelled);
      else
        news.end_output(sequence.get(), index, FinishReason::cancelled);
    }
  remove_ended();
}

void Loop::cancel_all() {
  for (Queue* queue : queues())
    for (const auto& sequence : *queue) news.end(sequence.get(), FinishReason::cancelled);
  remove_ended();
}

void Loop::abandon(const std::string& error) {
  stats_.loop_lost = true;
  for (Queue* queue : queues())
    for (const auto& sequence : *queue) news.end(sequence.get(), FinishReason::error, error);
  remove_ended();
}

void Loop::step() {
  timer_.start();
  StepInFlight& next = steps_[(oldest_ + in_flight_) % steps_.size()];
  next.clear();
  builder_.clear();
  bool launched = false;
  try {
    phase = "plan";
    expire();
    if (in_flight_ > 0 && steps_[oldest_].alone) finish();
    if (prepare(&next)) {
      launch(&next);
      launched = true;
    }
  } catch (const std::exception& error) {
    fail(next, error.what());
  }
  remove_ended();
  const size_t may_stay = asynchronous_ && launched ? 1 : 0;
  while (in_flight_ > may_stay) finish();
  timer_.lap(host_seconds());
  stats_.last_step_unix = unix_seconds();
}

void Loop::expire() {
  const auto now = Clock::now();
  for (Queue* queue : queues())
    for (const auto& sequence : *queue)
      if (sequence->request->deadline <= now) news.end(sequence.get(), FinishReason::timeout);
  remove_ended();
}

void Loop::launch(StepInFlight* next) {
  phase = "run";
  ++stats_.steps;
  timer_.lap(host_seconds());
  if (asynchronous_) {
    model_->enqueue(builder_.step(), next->draws);
    timer_.lap(host_seconds());
  } else {
    fault_.act(Fault::Place::forward);
    model_->run(builder_.step());
    timer_.lap(&stats_.model_seconds);
  }
  ++in_flight_;
  for (const Entry& entry : next->entries) {
    Sequence& sequence = *entry.sequence;
    sequence.computed = entry.end;
    ++sequence.in_flight;
    if (entry.row < 0) continue;
    ++sequence.pending;
    sequence.draw = entry.first_draw;
  }
  if (rates_.bytes_per_second > 0) count_least(*next);
}

void Loop::count_least(const StepInFlight& step) {
  work_.clear();
  Workload work{.sequences = {}, .logit_rows = 0, .kv_dtypes = model_->limits().kv_dtypes};
  for (const Entry& entry : step.entries) {
    work_.push_back({.tokens = entry.tokens, .context = entry.end - entry.tokens});
    work.logit_rows += entry.scored + (entry.row >= 0);
  }
  work.sequences = work_;
  cost(model_->program(), work, weight_bytes_, &costs_);
  const LeastSeconds least = least_seconds(costs_, rates_);
  stats_.least.all += least.all, stats_.least.weights += least.weights;
  stats_.least.kv += least.kv, stats_.least.arithmetic += least.arithmetic;
}

// Pages of a sequence that ended go back at once, though a step in flight may still use them: see the top of loop.h.
void Loop::remove_ended() {
  for (Queue* queue : queues()) {
    for (auto& sequence : *queue) {
      if (!sequence->over()) continue;
      cache_.release(sequence->pages);
      if (sequence->in_flight > 0)
        leaving_.push_back(std::move(sequence));
      else
        sequence.reset();
    }
    std::erase(*queue, nullptr);
  }
  std::erase_if(leaving_, [](const auto& sequence) { return sequence->in_flight == 0; });
}

const EngineStats& Loop::stats() {
  stats_.running = stats_.waiting = 0;
  for (const auto& sequence : running_) stats_.running += sequence->slots();
  for (const auto& sequence : waiting_) stats_.waiting += sequence->slots();
  for (const auto& sequence : parked_) stats_.waiting += sequence->slots();
  stats_.finished = news.finished;
  stats_.cancelled = news.cancelled;
  stats_.failed = news.failed;
  stats_.evictions = cache_.evicted();
  stats_.pages_total = cache_.pool().total();
  stats_.pages_cached = cache_.cached();
  stats_.pages_free = cache_.pool().free();
  stats_.pages_live = stats_.pages_total - stats_.pages_cached - stats_.pages_free;
  return stats_;
}

}  // namespace maga
