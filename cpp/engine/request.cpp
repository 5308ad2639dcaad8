// The ranges of SamplingParams: every message names the field, its value and what is valid.
#include "engine/request.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "core/check.h"

namespace maga {
namespace {

void check_tokens(std::span<const int32_t> tokens, int64_t vocab, const std::string& field) {
  for (const int32_t token : tokens)
    MAGA_REQUIRE(token >= 0 && token < vocab, field, " has the token id ", token, ": ids must be in [0, ", vocab, ")");
}

void check_words(const std::vector<std::vector<int32_t>>& words, int64_t vocab, const std::string& field) {
  for (size_t i = 0; i < words.size(); ++i) {
    MAGA_REQUIRE(!words[i].empty(), field, "[", i, "] is empty: a word must have at least one token");
    check_tokens(words[i], vocab, concat(field, "[", i, "]"));
  }
}

// Written so that NaN fails it.
void check_range(const char* field, float value, float least, float most) {
  MAGA_REQUIRE(value >= least && value <= most, field, " is ", value, ": it must be in [", least, ", ", most, "]");
}

}  // namespace

bool RareSamplers::any() const {
  return top_a > 0 || tfs < 1 || typical_p < 1 || epsilon_cutoff > 0 || eta_cutoff > 0 || nsigma > 0 || dynatemp_max > 0 ||
         temperature_last || smoothing_factor > 0 || skew != 0 || xtc_probability > 0 || mirostat_mode != 0 ||
         no_repeat_ngram_size > 0 || dry_multiplier > 0 || !token_bans.empty() || !token_ban_ranges.empty() ||
         !allowed_tokens.empty() || !sampler_priority.empty();
}

void RareSamplers::validate(int64_t vocab) const {
  constexpr float kLarge = 1e6f;
  check_range("top_a", top_a, 0, 1);
  check_range("tfs", tfs, 0, 1);
  check_range("typical_p", typical_p, 0, 1);
  check_range("epsilon_cutoff", epsilon_cutoff, 0, 9999);
  check_range("eta_cutoff", eta_cutoff, 0, 9999);
  check_range("nsigma", nsigma, 0, kLarge);
  check_range("dynatemp_min", dynatemp_min, 0, kLarge);
  check_range("dynatemp_max", dynatemp_max, 0, kLarge);
  MAGA_REQUIRE(dynatemp_min <= dynatemp_max, "dynatemp_min is ", dynatemp_min, ": it must be at most dynatemp_max, which is ",
               dynatemp_max);
  check_range("dynatemp_exponent", dynatemp_exponent, 0, kLarge);
  check_range("smoothing_factor", smoothing_factor, 0, kLarge);
  check_range("smoothing_curve", smoothing_curve, 1, kLarge);
  check_range("skew", skew, -20, 20);
  check_range("xtc_probability", xtc_probability, 0, 1);
  check_range("xtc_threshold", xtc_threshold, 0, 1);
  MAGA_REQUIRE(mirostat_mode == 0 || mirostat_mode == 2, "mirostat_mode is ", mirostat_mode, ": it must be 0 (off) or 2");
  check_range("mirostat_tau", mirostat_tau, 0, kLarge);
  check_range("mirostat_eta", mirostat_eta, 0, kLarge);
  MAGA_REQUIRE(no_repeat_ngram_size >= 0, "no_repeat_ngram_size is ", no_repeat_ngram_size, ": it must be 0 (off) or above");
  check_range("dry_multiplier", dry_multiplier, 0, kLarge);
  check_range("dry_base", dry_base, 1, kLarge);
  MAGA_REQUIRE(dry_allowed_length >= 1, "dry_allowed_length is ", dry_allowed_length, ": it must be at least 1");
  MAGA_REQUIRE(dry_range >= 0, "dry_range is ", dry_range, ": it must be 0 (all tokens) or above");
  check_tokens(dry_breakers, vocab, "dry_breakers");
  check_tokens(token_bans, vocab, "token_bans");
  for (const auto& [tokens, start, length] : token_ban_ranges) {
    check_tokens(tokens, vocab, "token_ban_ranges");
    MAGA_REQUIRE(start >= 0 && length >= 0, "token_ban_ranges has start ", start, " and length ", length,
                 ": both must be 0 or above");
  }
  check_tokens(allowed_tokens, vocab, "allowed_tokens");
  for (size_t i = 0; i < sampler_priority.size(); ++i) {
    const int stage = sampler_priority[i];
    MAGA_REQUIRE(stage >= 0 && stage < kSamplerStages, "sampler_priority[", i, "] is ", stage, ": it must be in [0, ",
                 kSamplerStages - 1, "]");
    MAGA_REQUIRE(std::count(sampler_priority.begin(), sampler_priority.end(), stage) == 1, "sampler_priority has ", stage,
                 " more than once");
  }
}

void SamplingParams::validate(int64_t vocab) const {
  MAGA_REQUIRE(max_new_tokens >= (prompt_logprobs < 0), "max_new_tokens is ", max_new_tokens,
               ": it must be at least 1, or 0 with prompt_logprobs");
  MAGA_REQUIRE(min_new_tokens >= 0 && min_new_tokens <= max_new_tokens, "min_new_tokens is ", min_new_tokens,
               ": it must be in [0, max_new_tokens], and max_new_tokens is ", max_new_tokens);
  // Written so that NaN fails every one of them.
  MAGA_REQUIRE(temperature >= 0 && std::isfinite(temperature), "temperature is ", temperature,
               ": it must be a finite number, 0 (greedy) or above");
  MAGA_REQUIRE(top_k >= 0, "top_k is ", top_k, ": it must be 0 (off) or above");
  MAGA_REQUIRE(top_p >= 0 && top_p <= 1, "top_p is ", top_p, ": it must be in [0, 1]");
  MAGA_REQUIRE(min_p >= 0 && min_p <= 1, "min_p is ", min_p, ": it must be in [0, 1]");
  MAGA_REQUIRE(top_p_decay > 0 && top_p_decay <= 1, "top_p_decay is ", top_p_decay, ": it must be in (0, 1], 1 is off");
  MAGA_REQUIRE(top_p_min > 0 && top_p_min <= 1, "top_p_min is ", top_p_min, ": it must be in (0, 1]");
  check_tokens(top_p_reset_ids, vocab, "top_p_reset_ids");
  rare.validate(vocab);
  MAGA_REQUIRE(beams.width == 0 || (beams.width >= 2 && beams.width <= vocab), "beam width is ", beams.width,
               ": it must be 0 (off) or in [2, ", vocab, "]");
  MAGA_REQUIRE(std::isfinite(beams.length_penalty), "length_penalty is ", beams.length_penalty, ": it must be a finite number");
  if (beams.width > 0)
    MAGA_REQUIRE(logprobs < 0 && max_new_tokens > 0 && !return_logits && !return_hidden_states && rare.mirostat_mode == 0,
                 "a beam search has no logprobs, logits, hidden states or mirostat, and at least one new token");
  MAGA_REQUIRE(repetition_penalty > 0 && std::isfinite(repetition_penalty), "repetition_penalty is ", repetition_penalty,
               ": it must be a finite number above 0");
  MAGA_REQUIRE(presence_penalty >= -2 && presence_penalty <= 2, "presence_penalty is ", presence_penalty,
               ": it must be in [-2, 2]");
  MAGA_REQUIRE(frequency_penalty >= -2 && frequency_penalty <= 2, "frequency_penalty is ", frequency_penalty,
               ": it must be in [-2, 2]");
  for (const auto& [token, bias] : logit_bias) {
    check_tokens({&token, 1}, vocab, "logit_bias");
    MAGA_REQUIRE(std::isfinite(bias), "logit_bias of token ", token, " is ", bias, ": it must be a finite number");
  }
  check_words(bad_words, vocab, "bad_words");
  check_words(stop_words, vocab, "stop_words");
  check_tokens(stop_token_ids, vocab, "stop_token_ids");
  for (size_t i = 0; i < stop_strings.size(); ++i)
    MAGA_REQUIRE(!stop_strings[i].empty(), "stop_strings[", i, "] is empty: a stop string must have at least one byte");
  MAGA_REQUIRE(logprobs >= -1 && logprobs <= vocab, "logprobs is ", logprobs,
               ": it must be -1 (none), 0 (the chosen token's) or the number of most likely tokens, at most ", vocab);
  MAGA_REQUIRE(prompt_logprobs >= -1 && prompt_logprobs <= vocab, "prompt_logprobs is ", prompt_logprobs,
               ": it must be -1 (none), 0 (the prompt's tokens') or the number of most likely tokens, at most ", vocab);
  check_tokens(select_tokens, vocab, "select_tokens");
}

}  // namespace maga
