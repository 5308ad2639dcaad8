// The default order is the table; the request's own comes before it.
#include "decode/stages.h"

#include <algorithm>
#include <array>
#include <limits>

#include "core/rng.h"
#include "decode/repeat.h"
#include "decode/truncate.h"

namespace maga {
namespace {

using Stage = SamplerStage;

constexpr std::array<Stage, kSamplerStages> kDefaultOrder = {
    Stage::dry,         Stage::penalties,   Stage::no_repeat_ngram, Stage::temperature,
    Stage::top_n_sigma, Stage::top_p_top_k, Stage::top_a,           Stage::min_p,
    Stage::tfs,         Stage::eta_cutoff,  Stage::epsilon_cutoff,  Stage::typical_p,
    Stage::quadratic,   Stage::xtc};

// A request's second random number for a token is one that no token's first is.
constexpr uint64_t kXtcDraw = uint64_t{1} << 63;
constexpr float kUnit = 1e-4f;  // of the cutoffs

bool edits(Stage stage) { return stage == Stage::dry || stage == Stage::penalties || stage == Stage::no_repeat_ngram; }

void ban_rare(MutableRow row, const SampleInput& input) {
  const RareSamplers& rare = input.params->rare;
  ban_tokens(row, rare.token_bans);
  for (const auto& [tokens, start, length] : rare.token_ban_ranges)
    if (input.output_tokens >= start && input.output_tokens - start < length) ban_tokens(row, tokens);
  if (rare.allowed_tokens.empty()) return;
  std::vector<std::pair<int32_t, float>> allowed;
  for (const int32_t token : rare.allowed_tokens) allowed.emplace_back(token, row[token]);
  std::fill(row.begin(), row.end(), -std::numeric_limits<float>::infinity());
  for (const auto& [token, logit] : allowed) row[token] = logit;
}

void heat(MutableRow row, const SamplingParams& p) {
  const RareSamplers& rare = p.rare;
  const float value = rare.dynatemp_max > 0 ? dynamic_temperature(row, rare.dynatemp_min, rare.dynatemp_max, rare.dynatemp_exponent)
                                            : p.temperature;
  if (value != 1) temperature(row, scan(row).max, value);
}

void run(Stage stage, MutableRow row, const SampleInput& input, SampleScratch* scratch) {
  const SamplingParams& p = *input.params;
  const RareSamplers& rare = p.rare;
  switch (stage) {
    case Stage::dry:
      if (rare.dry_multiplier > 0)
        dry(row, input.tokens,
            {.multiplier = rare.dry_multiplier,
             .base = rare.dry_base,
             .allowed_length = rare.dry_allowed_length,
             .range = rare.dry_range,
             .breakers = rare.dry_breakers});
      break;
    case Stage::penalties: penalize(row, input); break;
    case Stage::no_repeat_ngram:
      if (rare.no_repeat_ngram_size > 0) no_repeat_ngram(row, input.tokens, rare.no_repeat_ngram_size);
      break;
    case Stage::temperature:
      if (!rare.temperature_last) heat(row, p);
      break;
    case Stage::top_n_sigma:
      if (rare.nsigma > 0) top_n_sigma(row, rare.nsigma);
      break;
    case Stage::top_p_top_k: {
      const float nucleus = top_p_of(input);
      if (p.top_k > 0 && p.top_k < static_cast<int64_t>(row.size())) keep_top_k(row, p.top_k, &scratch->candidates);
      if (nucleus < 1) keep_top_p(row, nucleus, &scratch->candidates);
      break;
    }
    case Stage::top_a:
      if (rare.top_a > 0) top_a(row, rare.top_a);
      break;
    case Stage::min_p:
      if (p.min_p > 0) keep_min_p(row, p.min_p);
      break;
    case Stage::tfs:
      if (rare.tfs < 1) tail_free(row, rare.tfs, &scratch->candidates);
      break;
    case Stage::eta_cutoff:
      if (rare.eta_cutoff > 0) eta_cutoff(row, rare.eta_cutoff * kUnit);
      break;
    case Stage::epsilon_cutoff:
      if (rare.epsilon_cutoff > 0) epsilon_cutoff(row, rare.epsilon_cutoff * kUnit);
      break;
    case Stage::typical_p:
      if (rare.typical_p < 1) typical(row, rare.typical_p, &scratch->candidates);
      break;
    case Stage::quadratic:
      if (rare.smoothing_factor > 0) quadratic(row, rare.smoothing_factor, rare.smoothing_curve);
      break;
    case Stage::xtc:
      if (rare.xtc_probability > 0 && uniform(input.seed, input.stream, kXtcDraw | input.output_tokens) < rare.xtc_probability)
        exclude_top(row, rare.xtc_threshold);
      break;
  }
}

}  // namespace

void run_stages(MutableRow row, const SampleInput& input, SampleScratch* scratch) {
  const SamplingParams& p = *input.params;
  const bool greedy = is_greedy(p);
  const auto& own = p.rare.sampler_priority;
  ban(row, input);
  ban_rare(row, input);
  bool empty = !scan(row).finite;
  const auto turn = [&](Stage stage) {
    if (empty || (greedy && !edits(stage))) return;
    run(stage, row, input, scratch);
    if (edits(stage)) empty = !scan(row).finite;
  };
  for (const int stage : own) turn(static_cast<Stage>(stage));
  for (const Stage stage : kDefaultOrder)
    if (std::find(own.begin(), own.end(), static_cast<int>(stage)) == own.end()) turn(stage);
  if (p.rare.temperature_last && !greedy && !empty) heat(row, p);
}

void edit(MutableRow row, const SampleInput& input) {
  ban(row, input);
  ban_rare(row, input);
  for (const Stage stage : kDefaultOrder)
    if (edits(stage)) run(stage, row, input, nullptr);
}

int32_t draw_staged(MutableRow row, float max, const SampleInput& input, SampleScratch* scratch, float* surprise) {
  const RareSamplers& rare = input.params->rare;
  const double u = uniform(input.seed, input.stream, static_cast<uint64_t>(input.output_tokens));
  if (rare.mirostat_mode == 2) {
    const SurpriseOf surprise_of(row);
    drop_surprising(row, input.mirostat_mu);
    const int32_t token = draw(row, max, u, &scratch->blocks);
    *surprise = surprise_of(row[token]);
    return token;
  }
  if (rare.skew != 0) {
    skew(row, rare.skew, &scratch->candidates);
    max = scan(row).max;
  }
  return draw(row, max, u, &scratch->blocks);
}

}  // namespace maga
