// The stages in the order in which the chain runs them.
#include "decode/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/check.h"
#include "core/rng.h"
#include "decode/stages.h"

namespace maga {
namespace {

constexpr float kBanned = -std::numeric_limits<float>::infinity();

// Cuts candidates in any order to the best whose exp(logit - max) add up to `mass`, best first: a quickselect by mass.
void cut_at_mass(std::vector<Candidate>* candidates, float max, double mass) {
  auto cut = candidates->begin(), end = candidates->end();  // all before `cut` are kept, none from `end` on
  double sum = 0;                                           // of those before `cut`
  while (end - cut > 32) {
    const auto middle = cut + (end - cut) / 2;
    std::nth_element(cut, middle, end);
    double better = 0;
    for (auto at = cut; at != middle; ++at) better += exp_negative(at->logit - max);
    if (sum + better >= mass) {
      end = middle;
    } else {
      sum += better;
      cut = middle;
    }
  }
  std::sort(cut, end);
  while (cut != end && sum < mass) sum += exp_negative((cut++)->logit - max);
  candidates->erase(cut, candidates->end());
  std::sort(candidates->begin(), candidates->end());
}

int32_t draw_random(MutableRow row, float max, const SampleInput& input, SampleScratch* scratch) {
  const SamplingParams& p = *input.params;
  std::vector<Candidate>& candidates = scratch->candidates;
  temperature(row, max, p.temperature);
  const double u = uniform(input.seed, input.stream, static_cast<uint64_t>(input.output_tokens));
  const bool limited_k = p.top_k > 0 && p.top_k < static_cast<int64_t>(row.size());
  const float nucleus = top_p_of(input);
  if (limited_k) {
    top_k(row, p.top_k, &candidates);
    if (nucleus < 1) top_p(&candidates, nucleus);
    if (p.min_p > 0) min_p(&candidates, p.min_p);
  } else if (nucleus < 1) {
    top_p(row, 0, nucleus, &candidates);
    if (p.min_p > 0) min_p(&candidates, p.min_p);
  } else if (p.min_p > 0) {
    min_p(row, 0, p.min_p, &candidates);
  } else {
    return draw(row, 0, u, &scratch->blocks);
  }
  // In the order of their ids, as devices draw: a seed gives the same text whoever chooses.
  std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
  return draw(candidates, u);
}

}  // namespace

TokenCounts::Count& TokenCounts::of(int32_t token) {
  const auto at =
      std::lower_bound(counts_.begin(), counts_.end(), token, [](const Count& count, int32_t id) { return count.token < id; });
  if (at != counts_.end() && at->token == token) return *at;
  return *counts_.insert(at, {token, 0});
}

void TokenCounts::add_prompt(std::span<const int32_t> tokens) {
  std::vector<int32_t> unique(tokens.begin(), tokens.end());
  std::sort(unique.begin(), unique.end());
  unique.erase(std::unique(unique.begin(), unique.end()), unique.end());
  if (counts_.empty()) {
    for (const int32_t token : unique) counts_.push_back({token, 0});
  } else {
    for (const int32_t token : unique) of(token);
  }
}

void TokenCounts::add_output(int32_t token) { ++of(token).output; }

void repetition_penalty(MutableRow row, const TokenCounts& counts, float penalty) {
  for (const auto& count : counts.counts()) {
    float& logit = row[count.token];
    logit = logit > 0 ? logit / penalty : logit * penalty;
  }
}

void presence_penalty(MutableRow row, const TokenCounts& counts, float penalty) {
  for (const auto& count : counts.counts())
    if (count.output > 0) row[count.token] -= penalty;
}

void frequency_penalty(MutableRow row, const TokenCounts& counts, float penalty) {
  for (const auto& count : counts.counts()) row[count.token] -= penalty * static_cast<float>(count.output);
}

void logit_bias(MutableRow row, std::span<const std::pair<int32_t, float>> bias) {
  for (const auto& [token, value] : bias) row[token] += value;
}

void ban_bad_words(MutableRow row, std::span<const std::vector<int32_t>> words, std::span<const int32_t> tokens) {
  for (const auto& word : words) {
    const size_t before = word.size() - 1;
    if (before <= tokens.size() && std::equal(word.begin(), word.end() - 1, tokens.end() - before)) row[word.back()] = kBanned;
  }
}

void ban_tokens(MutableRow row, std::span<const int32_t> tokens) {
  for (const int32_t token : tokens) row[token] = kBanned;
}

void allow_tokens(MutableRow row, std::span<const uint32_t> allowed) {
  for (size_t begin = 0; begin < row.size(); begin += 32) {
    const uint32_t word = begin / 32 < allowed.size() ? allowed[begin / 32] : 0;
    if (word == ~uint32_t{0}) continue;
    const size_t end = std::min(row.size(), begin + 32);
    for (size_t t = begin; t < end; ++t)
      if (!(word >> (t - begin) & 1)) row[t] = kBanned;
  }
}

void temperature(MutableRow row, float max, float temperature) {
  const float scale = 1.0f / temperature;
  if (std::isfinite(scale)) {
    for (float& logit : row) logit = (logit - max) * scale;
  } else {  // 0 * infinity would be NaN
    for (float& logit : row) logit = logit == max ? 0 : kBanned;
  }
}

void top_k(Row row, int k, std::vector<Candidate>* candidates) { best_tokens(row, k, candidates); }

void top_p(Row row, float max, float p, std::vector<Candidate>* candidates) {
  const double total = exp_sum(row, max, nullptr);
  // All tokens below probability (1 - p) / vocab together have less than 1 - p, so none of them is needed to reach p.
  // The 1e-4 is a margin for the rounding of `bar`.
  const double floor = (1.0 - p) / static_cast<double>(row.size()) * total;
  const float bar = floor > 0 ? max + static_cast<float>(std::log(floor) - 1e-4) : kBanned;
  tokens_from(row, std::min(bar, max), candidates);
  cut_at_mass(candidates, max, p * total);
}

void top_p(std::vector<Candidate>* candidates, float p) {
  if (candidates->empty()) return;
  const float max = candidates->front().logit;
  double total = 0;
  for (const auto& candidate : *candidates) total += exp_negative(candidate.logit - max);
  cut_at_mass(candidates, max, p * total);
}

void min_p(Row row, float max, float p, std::vector<Candidate>* candidates) { tokens_from(row, max + std::log(p), candidates); }

void min_p(std::vector<Candidate>* candidates, float p) {
  if (candidates->empty()) return;
  const float bar = candidates->front().logit + std::log(p);
  while (candidates->size() > 1 && candidates->back().logit < bar) candidates->pop_back();
}

int32_t draw(std::span<const Candidate> candidates, double u) {
  MAGA_CHECK(!candidates.empty(), "nothing to draw from");
  float max = candidates.front().logit;
  for (const auto& candidate : candidates) max = std::max(max, candidate.logit);
  double total = 0;
  for (const auto& candidate : candidates) total += exp_negative(candidate.logit - max);
  double left = u * total;
  int32_t last = candidates.front().id;
  for (const auto& candidate : candidates) {
    const double weight = exp_negative(candidate.logit - max);
    if (weight > 0) last = candidate.id;
    left -= weight;
    if (left < 0) break;
  }
  return last;  // if rounding left something over: the last token that can be drawn at all
}

int32_t draw(Row row, float max, double u, std::vector<double>* blocks) {
  double left = u * exp_sum(row, max, blocks);
  size_t block = 0;
  for (size_t b = 0; b < blocks->size(); ++b) {
    if ((*blocks)[b] == 0) continue;
    block = b;
    if (left < (*blocks)[b]) break;
    left -= (*blocks)[b];
  }
  const size_t begin = block * kSumBlock, end = std::min(row.size(), begin + kSumBlock);
  size_t last = begin;
  for (size_t i = begin; i < end; ++i) {
    const double weight = exp_negative(row[i] - max);
    if (weight > 0) last = i;
    left -= weight;
    if (left < 0) break;
  }
  return static_cast<int32_t>(last);
}

TokenLogprobs logprobs(Row row, float max, int32_t token, int top, std::vector<Candidate>* candidates) {
  const float log_sum = max + static_cast<float>(std::log(exp_sum(row, max, nullptr)));
  TokenLogprobs result{.logprob = row[token] - log_sum, .rank = 0, .top = {}};
  if (top > 0) {
    best_tokens(row, top, candidates);
    for (const auto& candidate : *candidates) result.top.emplace_back(candidate.id, candidate.logit - log_sum);
  }
  return result;
}

bool has_penalty(const SamplingParams& params) {
  return params.repetition_penalty != 1 || params.presence_penalty != 0 || params.frequency_penalty != 0;
}

bool is_greedy(const SamplingParams& params) { return params.temperature == 0 || params.top_k == 1 || params.top_p == 0; }

bool edits_logits(const SamplingParams& params, int64_t output_tokens) {
  return has_penalty(params) || !params.logit_bias.empty() || !params.bad_words.empty() ||
         (output_tokens < params.min_new_tokens && !params.stop_token_ids.empty());
}

bool needs_host(const SamplingParams& params, int64_t output_tokens) {
  return edits_logits(params, output_tokens) || params.rare.any() || !params.top_p_reset_ids.empty() || params.beams.width > 0 ||
         params.logprobs >= 0 || params.return_logits || params.return_hidden_states || params.max_new_tokens == 0;
}

float top_p_of(const SampleInput& input) {
  const SamplingParams& params = *input.params;
  if (params.top_p_decay == 1 || params.top_p_reset_ids.empty()) return top_p_behind(params, input.output_tokens);
  const auto output = input.tokens.last(static_cast<size_t>(input.output_tokens));
  const auto& resets = params.top_p_reset_ids;
  const auto last = std::find_first_of(output.rbegin(), output.rend(), resets.begin(), resets.end());
  return top_p_behind(params, last - output.rbegin());
}

float top_p_behind(const SamplingParams& params, int64_t output_tokens) {
  if (params.top_p_decay == 1) return params.top_p;
  const double fallen = params.top_p * std::pow(params.top_p_decay, static_cast<double>(output_tokens));
  return std::max(static_cast<float>(fallen), std::min(params.top_p_min, params.top_p));
}

void penalize(MutableRow row, const SampleInput& input) {
  const SamplingParams& p = *input.params;
  if (has_penalty(p)) {
    MAGA_CHECK(input.counts, "penalties need the token counts");
    if (p.repetition_penalty != 1) repetition_penalty(row, *input.counts, p.repetition_penalty);
    if (p.presence_penalty != 0) presence_penalty(row, *input.counts, p.presence_penalty);
    if (p.frequency_penalty != 0) frequency_penalty(row, *input.counts, p.frequency_penalty);
  }
  logit_bias(row, p.logit_bias);
}

void ban(MutableRow row, const SampleInput& input) {
  const SamplingParams& p = *input.params;
  if (!input.allowed.empty()) allow_tokens(row, input.allowed);
  ban_bad_words(row, p.bad_words, input.tokens);
  if (input.output_tokens < p.min_new_tokens) ban_tokens(row, p.stop_token_ids);
}

void sample(const SampleInput& input, SampleScratch* scratch, Sampled* out) {
  const SamplingParams& params = *input.params;
  out->logprobs = {};
  const RowScan given = scan(input.logits);
  if (!given.finite) {
    out->status = Sampled::Status::non_finite;
    return;
  }
  RowScan edited = given;
  const bool rare = params.rare.any(), greedy = is_greedy(params);
  const bool edits = rare || !input.allowed.empty() || edits_logits(params, input.output_tokens);
  if (edits || !greedy) scratch->row.assign(input.logits.begin(), input.logits.end());
  if (edits) {
    if (rare) {
      run_stages(scratch->row, input, scratch);
    } else {
      penalize(scratch->row, input);
      ban(scratch->row, input);
    }
    edited = scan(scratch->row);
    if (!edited.finite) {
      out->status = Sampled::Status::no_token;
      return;
    }
  }
  out->status = Sampled::Status::ok;
  out->token = greedy ? edited.argmax
               : rare ? draw_staged(scratch->row, edited.max, input, scratch, &out->surprise)
                      : draw_random(scratch->row, edited.max, input, scratch);
  if (params.logprobs >= 0) out->logprobs = logprobs(input.logits, given.max, out->token, params.logprobs, &scratch->candidates);
}

}  // namespace maga
