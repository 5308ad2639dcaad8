// Beam search over one request: which continuations live on and which outputs have ended. The loop forks and drops their pages.
//
// The rules are those of transformers' generate(num_beams=..., do_sample=False), so that ids are the same: at every step the best
// continuations of all beams together are looked at, (1 + number of stop tokens) * width of them so that enough go on; of the best
// `width`, those that end become outputs with score = log probability / length^length_penalty; the best others are the next beams.
#pragma once

#include <cstdint>
#include <vector>

#include "decode/sampler.h"
#include "decode/stop.h"
#include "engine/request.h"

namespace maga {

// A token behind a beam, and the log probability of that beam with it.
struct Continuation {
  int32_t beam = 0;
  int32_t token = 0;
  float score = 0;
};

// An output that has ended.
struct Hypothesis {
  std::vector<int32_t> tokens;
  float score = 0, logprob = 0;
  FinishReason finish = FinishReason::none;
  StopMatch match;
};

class BeamSearch {
 public:
  BeamSearch(const SamplingParams& params, int64_t most_tokens);

  // How many continuations of a beam can matter.
  int64_t continuations() const { return continuations_; }
  int width() const { return params_.width; }
  // The best of `all`, best first.
  void choose(std::vector<Continuation>* all) const;

  // Takes an output that has ended; outside the best `width` none are kept.
  void finish(Hypothesis hypothesis);
  // After a step: whether the search is over. `best`: the score of the best beam that lives on; none does: `beams` is 0.
  bool over(int64_t beams, float best, int64_t output_tokens) const;
  // Best first.
  std::vector<Hypothesis>& finished() { return finished_; }
  float score(float logprob, int64_t output_tokens) const;

  bool ended = false;  // its outputs have been told

 private:
  BeamParams params_;
  int64_t most_tokens_, continuations_;
  std::vector<Hypothesis> finished_;
};

// log_softmax of the row, edited as for sampling, at its best tokens. Returns false where the row is not finite.
bool best_continuations(const SampleInput& input, int64_t count, SampleScratch* scratch, std::vector<Candidate>* best);

}  // namespace maga
