// A step of a beam search: the best continuations of all beams take the beams' places.
#include <algorithm>
#include <utility>

#include "core/check.h"
#include "engine/loop.h"

namespace maga {

// Once all beams of the request have chosen. Their sequences stay in replaced_ until the step is finished.
void Loop::advance(AcceptedRequest* request) {
  const auto waits = [&](const auto& sequence) { return sequence->request.get() == request && !sequence->chosen; };
  for (Queue* queue : queues())
    if (std::any_of(queue->begin(), queue->end(), waits)) return;

  BeamSearch& search = *request->beams;
  Queue beams = take_beams(*request);
  std::vector<Continuation> best;
  for (size_t i = 0; i < beams.size(); ++i)
    for (const Candidate& next : beams[i]->continuations)
      best.push_back({static_cast<int32_t>(i), next.id, beams[i]->beam_score + next.logit});
  search.choose(&best);

  const SamplingParams& params = request->request.params;
  Queue next;
  const auto width = static_cast<size_t>(search.width());
  for (size_t i = 0; i < best.size() && next.size() < width; ++i) {
    auto beam = std::make_unique<Sequence>(*beams[best[i].beam]);
    beam->siblings.clear();
    beam->continuations.clear();
    beam->chosen = false;
    beam->in_flight = 0;
    beam->tokens.push_back(best[i].token);
    beam->beam_score = best[i].score;
    const StopMatch match = beam->stop.append(beam->output());
    const bool longest = beam->output_tokens() >= params.max_new_tokens || beam->known() >= max_sequence_length_;
    if (!match && !longest) {
      beam->index = static_cast<int32_t>(next.size());
      next.push_back(std::move(beam));
    } else if (i < width) {
      const auto output = beam->output();
      search.finish({.tokens = {output.begin(), output.end()},
                     .score = search.score(best[i].score, beam->output_tokens()),
                     .logprob = best[i].score,
                     .finish = match ? FinishReason::stop : FinishReason::length,
                     .match = match});
    }
  }
  if (beams.front()->output_tokens() == 0)
    for (const auto& beam : next) beam->first_token_seconds = seconds_between(request->submitted, Clock::now());

  const int64_t length = beams.front()->output_tokens() + 1;
  const bool over = search.over(static_cast<int64_t>(next.size()), next.empty() ? 0 : next.front()->beam_score, length);
  if (over) tell_beams(*beams.front());
  // Held by the new beams before the old ones let go, so that no page is freed in between.
  if (!over)
    for (const auto& beam : next)
      for (const int32_t page : beam->pages) cache_.hold(page);
  for (auto& beam : beams) {
    cache_.release(beam->pages);
    beam->pages.clear();
    replaced_.push_back(std::move(beam));
  }
  if (over) return;
  for (auto& beam : next) {
    if (has_penalty(params)) beam->counts.add_output(beam->tokens.back());
    Queue* const queue = beam->pages.empty() ? &waiting_ : &running_;
    insert(queue, std::move(beam));
  }
}

// All beams of the request, out of the queues, in the order of their indices.
Loop::Queue Loop::take_beams(const AcceptedRequest& request) {
  Queue beams;
  for (Queue* queue : queues()) {
    for (auto& sequence : *queue)
      if (sequence->request.get() == &request) beams.push_back(std::move(sequence));
    std::erase(*queue, nullptr);
  }
  std::sort(beams.begin(), beams.end(), [](const auto& a, const auto& b) { return a->index < b->index; });
  return beams;
}

// The search's outputs, best first, each whole.
void Loop::tell_beams(const Sequence& sequence) {
  AcceptedRequest& request = *sequence.request;
  auto& finished = request.beams->finished();
  if (finished.size() < static_cast<size_t>(request.request.sequences))
    return news.end_beams(sequence, FinishReason::error,
                          concat("only ", finished.size(), " outputs can be told apart: bans leave too few tokens"));
  request.beams->ended = true;
  for (int32_t i = 0; i < request.request.sequences; ++i) {
    Hypothesis& output = finished[i];
    Event& event = news.report(sequence, i);
    event.output_tokens = static_cast<int64_t>(output.tokens.size());
    stats_.output_tokens += output.tokens.size();
    event.tokens = std::move(output.tokens);
    event.cumulative_logprob = output.logprob;
    event.finish = output.finish;
    event.stop_token = output.match.stop_token;
    event.stop_word = output.match.stop_word;
    event.stop_string = output.match.stop_string;
    news.count_end(&request, output.finish);
  }
}

}  // namespace maga
