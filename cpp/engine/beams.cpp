// Arithmetic of scores in fp32, as transformers has it, so that ties and near ties fall the same way.
#include "engine/beams.h"

#include <algorithm>
#include <cmath>

#include "decode/row.h"
#include "decode/stages.h"

namespace maga {

BeamSearch::BeamSearch(const SamplingParams& params, int64_t most_tokens)
    : params_(params.beams),
      most_tokens_(most_tokens),
      continuations_(std::max<int64_t>(2, 1 + static_cast<int64_t>(params.stop_token_ids.size())) * params.beams.width) {}

void BeamSearch::choose(std::vector<Continuation>* all) const {
  const auto better = [](const Continuation& a, const Continuation& b) {
    if (a.score != b.score) return a.score > b.score;
    return a.beam != b.beam ? a.beam < b.beam : a.token < b.token;
  };
  const auto kept = std::min<size_t>(all->size(), static_cast<size_t>(continuations_));
  std::partial_sort(all->begin(), all->begin() + kept, all->end(), better);
  all->resize(kept);
}

float BeamSearch::score(float logprob, int64_t output_tokens) const {
  return logprob / std::pow(static_cast<float>(output_tokens), params_.length_penalty);
}

void BeamSearch::finish(Hypothesis hypothesis) {
  const auto place = std::upper_bound(finished_.begin(), finished_.end(), hypothesis,
                                      [](const Hypothesis& a, const Hypothesis& b) { return a.score > b.score; });
  finished_.insert(place, std::move(hypothesis));
  if (finished_.size() > static_cast<size_t>(params_.width)) finished_.pop_back();
}

bool BeamSearch::over(int64_t beams, float best, int64_t output_tokens) const {
  if (beams == 0) return true;
  if (finished_.size() < static_cast<size_t>(params_.width)) return false;
  if (params_.stop == BeamParams::Stop::first) return true;
  const bool longest = params_.stop == BeamParams::Stop::never && params_.length_penalty > 0;
  return score(best, longest ? most_tokens_ : output_tokens) <= finished_.back().score;
}

bool best_continuations(const SampleInput& input, int64_t count, SampleScratch* scratch, std::vector<Candidate>* best) {
  const RowScan given = scan(input.logits);
  if (!given.finite) return false;
  const float log_sum = given.max + static_cast<float>(std::log(exp_sum(input.logits, given.max, nullptr)));
  scratch->row.resize(input.logits.size());
  for (size_t i = 0; i < input.logits.size(); ++i) scratch->row[i] = input.logits[i] - log_sum;
  edit(scratch->row, input);
  best_tokens(scratch->row, count, best);
  return true;
}

}  // namespace maga
