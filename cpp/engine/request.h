// What crosses between the server and the engine: requests going in, events coming out.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace maga {

// How the next token is chosen. Every field is honoured; validate() refuses values outside the stated range by name.
struct SamplingParams {
  int max_new_tokens = 1000;     // >= 1
  int min_new_tokens = 0;        // no stop token or stop word ends the sequence before this many
  float temperature = 1;         // >= 0; 0: greedy
  int top_k = 0;                 // >= 0; 0: off, 1: greedy
  float top_p = 1;               // in [0, 1]; 1: off, 0: greedy
  float min_p = 0;               // in [0, 1]; 0: off
  float repetition_penalty = 1;  // > 0; divides (multiplies, if negative) the logits of tokens seen in prompt or output
  float presence_penalty = 0;    // in [-2, 2]; subtracted once for tokens seen in the output
  float frequency_penalty = 0;   // in [-2, 2]; subtracted for each occurrence in the output
  std::optional<uint64_t> seed;  // without: drawn when the request is submitted
  std::vector<std::pair<int32_t, float>> logit_bias;  // added to the logits
  std::vector<std::vector<int32_t>> bad_words;        // token sequences that must not be completed
  std::vector<std::vector<int32_t>> stop_words;       // token sequences that end the output
  std::vector<std::string> stop_strings;              // byte strings that end the output (needs Engine::set_vocabulary)
  std::vector<int32_t> stop_token_ids;                // eos and the like
  int logprobs = -1;                                  // -1: none, 0: of the chosen token, n: and of the n most likely

  void validate(int64_t vocab) const;
};

struct Request {
  std::vector<int32_t> prompt;  // token ids, at least one
  SamplingParams params;
  int sequences = 1;           // outputs wanted; they share the prompt's pages
  int priority = 0;            // lower runs first
  double timeout_seconds = 0;  // from submission; 0: none
  std::string cache_salt;      // requests with different salts never share cached pages
  // Prompt tokens from this one on have positions that are `segment_shift` higher: a second segment's rows in a table of positions.
  int64_t segment_start = std::numeric_limits<int64_t>::max();
  int64_t segment_shift = 0;
};

enum class FinishReason : uint8_t { none, stop, length, cancelled, timeout, error };

struct TokenLogprobs {
  float logprob = 0;                           // of the token that was chosen, from the unmodified logits
  std::vector<std::pair<int32_t, float>> top;  // the most likely tokens, best first
};

// News of one sequence: what was generated since the last event, and how it ended, if it did.
struct Event {
  uint64_t request = 0;
  int32_t sequence = 0;  // 0 .. Request::sequences - 1
  std::vector<int32_t> tokens;
  std::vector<TokenLogprobs> logprobs;  // as many as tokens, if asked for
  FinishReason finish = FinishReason::none;
  int32_t stop_token = -1;       // the stop token that ended the output; it is the last of `tokens`
  int32_t stop_word = -1;        // index into stop_words that ended it; its ids end the output
  int32_t stop_string = -1;      // index into stop_strings that ended it; the text ends inside the last token
  std::string error;             // for FinishReason::error
  std::vector<float> embedding;  // of the prompt, where the program embeds: the only event, without tokens
  // Figures of the sequence so far.
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;  // prompt tokens found in the prefix cache
  int64_t output_tokens = 0;
  int64_t steps = 0;               // engine steps it took part in
  double cumulative_logprob = 0;   // of the chosen tokens, if logprobs are asked for
  double wait_seconds = 0;         // in the queue
  double first_token_seconds = 0;  // from submission
  double total_seconds = 0;        // from submission
};

}  // namespace maga
