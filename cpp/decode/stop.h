// When an output ends: stop tokens, stop words (token sequences) and stop strings (bytes, wherever the tokens are cut).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/request.h"

namespace maga {

// The bytes of each token id. Ids beyond the table have none.
class Vocabulary {
 public:
  explicit Vocabulary(const std::vector<std::string>& token_bytes);
  std::string_view bytes(int32_t token) const;

 private:
  std::string bytes_;
  std::vector<size_t> start_;  // (tokens + 1)
};

// What ended the output: one of them is not -1.
struct StopMatch {
  int32_t stop_token = -1;
  int32_t stop_word = -1;    // index into stop_words
  int32_t stop_string = -1;  // index into stop_strings
  explicit operator bool() const { return stop_token >= 0 || stop_word >= 0 || stop_string >= 0; }
};

// Follows one output. A copy follows a fork of it.
class StopMatcher {
 public:
  // `params` must outlive the matcher; `vocabulary` is needed for stop strings only.
  StopMatcher(const SamplingParams& params, std::shared_ptr<const Vocabulary> vocabulary);

  // `output` is everything generated so far; it has grown by one token since the last call. A stop token counts before a stop
  // word, a stop word before a stop string; among stop strings the one that begins first. None ends fewer than min_new_tokens.
  StopMatch append(std::span<const int32_t> output);

 private:
  int32_t find_string(std::string_view added);

  const SamplingParams* params_;
  std::shared_ptr<const Vocabulary> vocabulary_;
  size_t longest_ = 0;  // bytes of the longest stop string
  std::string tail_;    // the last bytes of the output: enough for a stop string that ends in the next token
};

}  // namespace maga
