// Every output ends exactly once: through end_output(), or through Loop::append with its last token.
#include "engine/news.h"

#include <algorithm>
#include <utility>

namespace maga {

Event& News::report(const Sequence& sequence, int32_t index) {
  const AcceptedRequest& request = *sequence.request;
  return events.emplace_back(Event{.request = request.id,
                                   .sequence = index,
                                   .tokens = {},
                                   .logprobs = {},
                                   .prompt_logprobs = {},
                                   .logits = {},
                                   .hidden_states = {},
                                   .error = {},
                                   .embedding = {},
                                   .prompt_tokens = sequence.prompt_tokens() - request.prefix,
                                   .cached_tokens = request.cached_tokens,
                                   .output_tokens = sequence.output_tokens(),
                                   .steps = sequence.steps,
                                   .cumulative_logprob = sequence.cumulative_logprob,
                                   .wait_seconds = request.wait_seconds,
                                   .first_token_seconds = sequence.first_token_seconds,
                                   .total_seconds = seconds_between(request.submitted, Clock::now())});
}

void News::end(Sequence* sequence, FinishReason reason, const std::string& error) {
  if (sequence->over()) return;
  if (sequence->request->beams) return end_beams(*sequence, reason, error);
  while (!sequence->siblings.empty()) end_output(sequence, sequence->siblings.back(), reason, error);
  end_output(sequence, sequence->index, reason, error);
}

void News::end_beams(const Sequence& sequence, FinishReason reason, const std::string& error) {
  AcceptedRequest& request = *sequence.request;
  request.beams->ended = true;
  if (!request.started) request.wait_seconds = seconds_between(request.submitted, Clock::now());
  for (int32_t i = 0; i < request.request.sequences; ++i) {
    Event& event = report(sequence, i);
    event.output_tokens = 0;
    event.finish = reason;
    event.error = error;
    count_end(&request, reason);
  }
}

void News::end_output(Sequence* sequence, int32_t index, FinishReason reason, const std::string& error) {
  if (sequence->request->beams) return end(sequence, reason, error);  // one is as good as all
  auto& siblings = sequence->siblings;
  const auto sibling = std::find(siblings.begin(), siblings.end(), index);
  if (sibling != siblings.end()) {
    siblings.erase(sibling);
  } else if (index != sequence->index) {
    return;
  } else if (!siblings.empty()) {
    sequence->index = siblings.front();
    siblings.erase(siblings.begin());
  } else {
    sequence->ended = true;
  }
  AcceptedRequest& request = *sequence->request;
  if (!request.started) request.wait_seconds = seconds_between(request.submitted, Clock::now());
  Event& event = report(*sequence, index);
  event.finish = reason;
  event.error = error;
  count_end(&request, reason);
}

void News::count_end(AcceptedRequest* request, FinishReason reason) {
  request->cancelled |= reason == FinishReason::cancelled;
  request->failed |= reason == FinishReason::error || reason == FinishReason::timeout;
  if (--request->unfinished > 0) return;
  mark_started(request);
  ++ended;
  ++(request->failed ? failed : request->cancelled ? cancelled : finished);
}

bool News::mark_started(AcceptedRequest* request) {
  if (std::exchange(request->started, true)) return false;
  started.fetch_add(1, std::memory_order_relaxed);
  return true;
}

}  // namespace maga
