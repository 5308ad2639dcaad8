// The phases of a step once it has run: choose, commit, and what a failure leaves.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <utility>

#include "core/check.h"
#include "core/threads.h"
#include "engine/loop.h"

namespace maga {
namespace {

// body(i, thread) for each i below `count`, shared among the threads. They must not throw: what goes wrong is thrown here.
template <typename Body>
void share(ThreadPool& threads, size_t count, const char* what, Body body) {
  std::atomic<bool> failed{false};
  threads.parallel_for(static_cast<int64_t>(count), 1, [&](int64_t begin, int64_t end, int thread) {
    try {
      for (int64_t i = begin; i < end; ++i) body(i, thread);
    } catch (const std::exception&) {
      failed = true;
    }
  });
  MAGA_CHECK(!failed, what, " failed");
}

}  // namespace

// Ends the oldest step in flight. What goes wrong ends its sequences; a step behind it goes on without them.
void Loop::finish() {
  timer_.lap(host_seconds());
  StepInFlight& step = steps_[oldest_];
  oldest_ = (oldest_ + 1) % steps_.size();
  --in_flight_;
  for (const Entry& entry : step.entries) {
    --entry.sequence->in_flight;
    if (entry.row >= 0) --entry.sequence->pending;
  }
  try {
    std::span<const Drawn> drawn;
    if (asynchronous_) {
      phase = "collect";
      drawn = model_->collect();
      fault_.act(Fault::Place::forward);
      timer_.lap(&stats_.model_seconds);
    }
    phase = "choose";
    choose(&step, drawn);
    timer_.lap(&stats_.sample_seconds);
    phase = "commit";
    commit(&step);
  } catch (const std::exception& error) {
    fail(step, error.what());
  }
  replaced_.clear();
  remove_ended();
  timer_.lap(host_seconds());
}

// Fills choices_: from what the device drew, and by sampling the other rows on the host.
void Loop::choose(StepInFlight* step, std::span<const Drawn> drawn) {
  fault_.act(Fault::Place::sample);
  MAGA_CHECK(drawn.size() == step->draws.size(), "the device made ", drawn.size(), " draws of ", step->draws.size());
  used_choices_ = 0;
  bool any_row = false, any_on_host = false;
  read_rows(*step);
  for (Entry& entry : step->entries) {
    if (entry.row < 0) continue;
    const bool on_host = entry.first_draw < 0;
    any_row = true;
    any_on_host |= on_host;
    entry.first_choice = static_cast<int32_t>(used_choices_);
    entry.choices = !on_host ? entry.draws : entry.sequence->request->beams ? 1 : entry.sequence->slots();
    for (int32_t i = 0; i < entry.choices; ++i) {
      if (used_choices_ == choices_.size()) choices_.emplace_back();
      Choice& choice = choices_[used_choices_++];
      choice.row = entry.row;
      choice.withheld = false;
      choice.sequence = on_host ? entry.sequence : nullptr;
      if (on_host) {
        choice.output = entry.sequence->output_at(i);
      } else {
        const Drawn& made = drawn[entry.first_draw + i];
        choice.output = static_cast<int32_t>(step->draws[entry.first_draw + i].stream);
        choice.result.status = made.finite ? Sampled::Status::ok : Sampled::Status::non_finite;
        choice.result.token = made.token;
      }
    }
  }
  if (any_row && fault_.fires(Fault::Kind::nan, Fault::Place::forward)) poison(*step);
  if (any_on_host) model_->program().embeds ? embed() : sample_on_host();
  score(step);
}

// One number of one row is no number, as a broken kernel leaves it; of a row that the device drew from, the device says so.
void Loop::poison(const StepInFlight& step) {
  const auto last = std::find_if(step.entries.rbegin(), step.entries.rend(), [](const Entry& entry) { return entry.row >= 0; });
  if (last->first_draw >= 0) {
    for (int32_t i = 0; i < last->choices; ++i) choices_[last->first_choice + i].result.status = Sampled::Status::non_finite;
    return;
  }
  const int64_t width = model_->program().logits_width();
  poisoned_.assign(logits_.begin(), logits_.end());
  poisoned_[last->row * width + stats_.steps % width] = std::numeric_limits<float>::quiet_NaN();
  logits_ = poisoned_;
}

// Brings to the host what of the step's rows is needed there.
void Loop::read_rows(const StepInFlight& step) {
  bool logits = false, hidden = false;
  int32_t rows = 0;
  for (const Entry& entry : step.entries) {
    logits |= entry.scored > 0 || (entry.row >= 0 && entry.first_draw < 0);
    hidden |= entry.row >= 0 && entry.sequence->request->request.params.return_hidden_states;
    rows = std::max({rows, entry.first_scored + entry.scored, entry.row + 1});
  }
  logits_ = logits ? model_->logits() : std::span<const float>();
  if (hidden) hidden_ = model_->read_value(hidden_state_.value, rows);
}

void Loop::sample_on_host() {
  await_masks();
  const int64_t vocab = model_->program().vocab;
  share(backend_->threads(), used_choices_, "choosing the tokens", [&](int64_t i, int thread) {
    Choice& choice = choices_[i];
    if (!choice.sequence || choice.withheld) return;
    const Sequence& sequence = *choice.sequence;
    choice.result.status = Sampled::Status::ok;
    if (sequence.request->request.params.max_new_tokens == 0) return;
    const SampleInput input{
        .logits = logits_.subspan(choice.row * vocab, vocab),
        .params = &sequence.request->request.params,
        .counts = &sequence.counts,
        .tokens = std::span(sequence.tokens).subspan(sequence.request->prefix),
        .output_tokens = sequence.output_tokens(),
        .allowed = sequence.allowed ? std::span<const uint32_t>(sequence.allowed->allowed) : std::span<const uint32_t>(),
        .seed = sequence.request->seed,
        .stream = static_cast<uint64_t>(choice.output),
        .mirostat_mu = sequence.mirostat_mu};
    if (const BeamSearch* beams = sequence.request->beams.get()) {
      if (!best_continuations(input, beams->continuations(), &scratch_[thread], &choice.continuations))
        choice.result.status = Sampled::Status::non_finite;
    } else {
      maga::sample(input, &scratch_[thread], &choice.result);
    }
  });
}

// Log probabilities of the tokens of prompts, each from the row before it.
void Loop::score(StepInFlight* step) {
  size_t count = 0;
  for (Entry& entry : step->entries) {
    entry.first_score = static_cast<int32_t>(count);
    const Sequence& sequence = *entry.sequence;
    const int64_t first = std::max(sequence.scored, entry.end - entry.tokens);
    for (int32_t i = 0; i < entry.scored; ++i, ++count) {
      if (count == scores_.size()) scores_.emplace_back();
      scores_[count].row = entry.first_scored + i;
      scores_[count].token = sequence.tokens[first + i + 1];
      scores_[count].top = sequence.request->request.params.prompt_logprobs;
    }
  }
  const int64_t vocab = model_->program().vocab;
  share(backend_->threads(), count, "computing the log probabilities of prompts", [&](int64_t i, int thread) {
    Score& score = scores_[i];
    const Row row = logits_.subspan(score.row * vocab, vocab);
    const RowScan seen = scan(row);
    score.finite = seen.finite;
    if (!seen.finite) return;
    score.result = logprobs(row, seen.max, score.token, score.top, &scratch_[thread].candidates);
    score.result.rank = rank(row, score.token);
  });
}

// Rows of the result as they are, where the program embeds.
void Loop::embed() {
  const auto rows = logits_;
  const int64_t width = model_->program().logits_width();
  for (size_t i = 0; i < used_choices_; ++i) {
    Choice& choice = choices_[i];
    const int64_t count = model_->program().row_per_token ? choice.sequence->known() : 1;
    const auto row = rows.subspan(choice.row * width, count * width);
    choice.embedding.assign(row.begin(), row.end());
    const bool finite = std::all_of(row.begin(), row.end(), [](float x) { return std::isfinite(x); });
    choice.result.status = finite ? Sampled::Status::ok : Sampled::Status::non_finite;
  }
}

void Loop::commit(StepInFlight* step) {
  for (const Entry& entry : step->entries) {
    Sequence* sequence = entry.sequence;
    if (sequence->over()) continue;  // since the step was launched: its result is dropped
    fault_.act(Fault::Place::commit);
    ++sequence->steps;
    const bool withheld = entry.row >= 0 && choice_of(entry, sequence->index)->withheld;
    if ((entry.row >= 0 && !withheld && choice_of(entry, sequence->index)->result.status == Sampled::Status::non_finite) ||
        !tell_scores(sequence, entry)) {
      cache_.forget(sequence->pages);
      ++stats_.corrupted;
      news.end(sequence, FinishReason::error, "non-finite logits");
      continue;
    }
    const int64_t cacheable = std::min(entry.end, sequence->request->cacheable_tokens);
    cache_.insert(sequence->salt(), behind_pinned(std::span(sequence->tokens).first(cacheable)),
                  std::span(sequence->pages).subspan(pinned_full_), &sequence->cached);
    if (entry.row < 0) continue;
    if (withheld) {
      withhold(sequence, entry);
      continue;
    }
    if (sequence->request->beams) {
      sequence->continuations.swap(choice_of(entry, sequence->index)->continuations);
      sequence->chosen = true;
      continue;
    }
    if (!sequence->siblings.empty()) fork(step, entry);
    model_->program().embeds ? deliver(sequence, choice_of(entry, sequence->index))
                             : append(sequence, choice_of(entry, sequence->index));
  }
  for (const Entry& entry : step->entries)
    if (entry.row >= 0 && entry.sequence->chosen && !entry.sequence->over()) advance(entry.sequence->request.get());
}

// Returns whether all of them are finite; tells none of them otherwise.
bool Loop::tell_scores(Sequence* sequence, const Entry& entry) {
  if (entry.scored == 0) return true;
  const auto scores = std::span(scores_).subspan(entry.first_score, entry.scored);
  if (std::any_of(scores.begin(), scores.end(), [](const Score& score) { return !score.finite; })) return false;
  sequence->scored = std::max(sequence->scored, entry.end - entry.tokens) + entry.scored;
  Event& event = news.report(*sequence, sequence->index);
  for (Score& score : scores) event.prompt_logprobs.push_back(std::move(score.result));
  return true;
}

// Outputs may have been cancelled since the step was launched, so they are looked up.
Loop::Choice* Loop::choice_of(const Entry& entry, int32_t output) {
  Choice* first = &choices_[entry.first_choice];
  Choice* found = std::find_if(first, first + entry.choices, [&](const Choice& choice) { return choice.output == output; });
  MAGA_CHECK(found != first + entry.choices, "nothing was chosen for output ", output);
  return found;
}

// The prompt is computed: every other output gets a sequence of its own that shares all pages, the partial one too.
void Loop::fork(StepInFlight* step, const Entry& entry) {
  Sequence* sequence = entry.sequence;
  while (!sequence->siblings.empty()) {
    auto owned = std::make_unique<Sequence>(*sequence);
    Sequence* copy = owned.get();
    copy->index = sequence->siblings.front();
    copy->siblings.clear();
    for (const int32_t page : copy->pages) cache_.hold(page);
    insert(&running_, std::move(owned));
    step->forks.push_back(copy);
    sequence->siblings.erase(sequence->siblings.begin());
    fault_.act(Fault::Place::commit);
    append(copy, choice_of(entry, copy->index));
  }
}

void Loop::append(Sequence* sequence, Choice* choice) {
  AcceptedRequest& request = *sequence->request;
  const SamplingParams& params = request.request.params;
  if (params.max_new_tokens == 0) {
    sequence->ended = true;
    news.report(*sequence, sequence->index).finish = FinishReason::length;
    return news.count_end(&request, FinishReason::length);
  }
  if (choice->result.status == Sampled::Status::no_token)
    return news.end(sequence, FinishReason::error,
                    "no token can be chosen: grammar, penalties, logit_bias, bad_words and min_new_tokens leave none");

  const int32_t token = choice->result.token;
  if (token < 0 || token >= model_->program().vocab)  // of a kernel's mistake, which the next step would read weights by
    return news.end(sequence, FinishReason::error, "the token " + std::to_string(token) + " was chosen, which there is not");
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

  if (params.rare.mirostat_mode == 2)
    sequence->mirostat_mu -= params.rare.mirostat_eta * (choice->result.surprise - params.rare.mirostat_tau);
  if (params.logprobs >= 0) sequence->cumulative_logprob += choice->result.logprobs.logprob;
  Event& event = news.report(*sequence, sequence->index);
  event.tokens.push_back(token);
  if (params.logprobs >= 0) event.logprobs.push_back(std::move(choice->result.logprobs));
  add_rows(params, choice->row, &event);
  event.finish = finish;
  event.stop_token = match.stop_token;
  event.stop_word = match.stop_word;
  event.stop_string = match.stop_string;
  if (finish == FinishReason::none) {
    if (sequence->allowed) sequence->allowed = masks_->ask(request.request.grammar, sequence->index, token);
    return;
  }
  sequence->ended = true;
  news.count_end(&request, finish);
}

// The logits and the hidden state of a row, if the request asks for them.
void Loop::add_rows(const SamplingParams& params, int32_t row, Event* event) const {
  if (params.return_logits) {
    const int64_t vocab = model_->program().vocab;
    const Row logits = logits_.subspan(row * vocab, vocab);
    if (params.select_tokens.empty()) event->logits.assign(logits.begin(), logits.end());
    for (const int32_t token : params.select_tokens) event->logits.push_back(logits[token]);
  }
  if (params.return_hidden_states) {
    const auto first = hidden_.begin() + row * model_->program().values[hidden_state_.value].width + hidden_state_.offset;
    event->hidden_states.assign(first, first + hidden_state_.width);
  }
}

// The one event of a prompt that is embedded.
void Loop::deliver(Sequence* sequence, Choice* choice) {
  sequence->first_token_seconds = seconds_between(sequence->request->submitted, Clock::now());
  Event& event = news.report(*sequence, sequence->index);
  event.embedding = std::move(choice->embedding);
  event.finish = FinishReason::stop;
  sequence->ended = true;
  news.count_end(sequence->request.get(), FinishReason::stop);
}

// The step threw. What it computed is unknown, so its sequences end; should it have thrown before any was chosen, all of them do,
// since otherwise the next step would throw again.
void Loop::fail(const StepInFlight& step, const std::string& error) {
  stats_.device_lost = model_->lost();
  const std::string text =
      concat("the step failed: ", error, stats_.device_lost ? " (the device is lost: restart the server)" : "");
  for (const Entry& entry : step.entries) news.end(entry.sequence, FinishReason::error, text);
  for (Sequence* fork : step.forks) news.end(fork, FinishReason::error, text);
  if (step.entries.empty())
    for (Queue* queue : queues())
      for (const auto& sequence : *queue) news.end(sequence.get(), FinishReason::error, text);
}

}  // namespace maga
