// The ranges of SamplingParams: every message names the field, its value and what is valid.
#include "engine/request.h"

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

}  // namespace

void SamplingParams::validate(int64_t vocab) const {
  MAGA_REQUIRE(max_new_tokens >= 1, "max_new_tokens is ", max_new_tokens, ": it must be at least 1");
  MAGA_REQUIRE(min_new_tokens >= 0 && min_new_tokens <= max_new_tokens, "min_new_tokens is ", min_new_tokens,
               ": it must be in [0, max_new_tokens], and max_new_tokens is ", max_new_tokens);
  // Written so that NaN fails every one of them.
  MAGA_REQUIRE(temperature >= 0 && std::isfinite(temperature), "temperature is ", temperature,
               ": it must be a finite number, 0 (greedy) or above");
  MAGA_REQUIRE(top_k >= 0, "top_k is ", top_k, ": it must be 0 (off) or above");
  MAGA_REQUIRE(top_p >= 0 && top_p <= 1, "top_p is ", top_p, ": it must be in [0, 1]");
  MAGA_REQUIRE(min_p >= 0 && min_p <= 1, "min_p is ", min_p, ": it must be in [0, 1]");
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
}

}  // namespace maga
