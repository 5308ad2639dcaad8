// What crosses between the server and the engine: requests going in, events coming out.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace maga {

// The stages that few requests ask for: a request with any of them has its tokens chosen on the host. Values say "off" by default.
// Formulas: decode/truncate.h, decode/repeat.h; names and units: Aphrodite's and RTP-LLM's.
struct RareSamplers {
  float top_a = 0;           // in [0, 1]
  float tfs = 1;             // in [0, 1]
  float typical_p = 1;       // in [0, 1]
  float epsilon_cutoff = 0;  // in [0, 10000), in units of 1e-4
  float eta_cutoff = 0;      // the same
  float nsigma = 0;          // >= 0
  // With dynatemp_max > 0 the temperature lies between the two and follows the entropy.
  float dynatemp_min = 0, dynatemp_max = 0;  // 0 <= min <= max
  float dynatemp_exponent = 1;               // >= 0
  bool temperature_last = false;             // the temperature comes behind the stages that drop tokens
  float smoothing_factor = 0;                // >= 0
  float smoothing_curve = 1;                 // >= 1
  float skew = 0;
  float xtc_probability = 0;  // in [0, 1]
  float xtc_threshold = 0.1f;
  int mirostat_mode = 0;      // 0 or 2
  float mirostat_tau = 5;     // > 0, bits
  float mirostat_eta = 0.1f;  // > 0
  int no_repeat_ngram_size = 0;
  float dry_multiplier = 0;    // >= 0
  float dry_base = 1.75f;      // >= 1
  int dry_allowed_length = 2;  // >= 1
  int dry_range = 0;           // tokens; 0: all
  std::vector<int32_t> dry_breakers;
  std::vector<int32_t> token_bans;
  // Tokens that are banned from an output token on, for a number of them.
  std::vector<std::tuple<std::vector<int32_t>, int64_t, int64_t>> token_ban_ranges;
  std::vector<int32_t> allowed_tokens;  // no others; empty: all
  // Of the stages named here, the order (SamplerStage); the others follow in the default one.
  std::vector<int> sampler_priority;

  bool any() const;
  void validate(int64_t vocab) const;
};

// By the numbers of Aphrodite's sampler_priority.
enum class SamplerStage : int {
  top_p_top_k,
  top_a,
  min_p,
  tfs,
  typical_p,
  temperature,
  penalties,  // repetition, presence, frequency, then logit_bias
  dry,
  no_repeat_ngram,
  top_n_sigma,
  eta_cutoff,
  epsilon_cutoff,
  quadratic,
  xtc,
};
constexpr int kSamplerStages = 14;

// Beam search instead of drawing: the `width` most likely outputs at every step, as transformers' generate does it.
struct BeamParams {
  enum class Stop : uint8_t {
    heuristic,  // when no beam can improve on the outputs that have ended, as far as their present lengths tell
    first,      // when `width` outputs have ended
    never,      // as heuristic, but with the length that favours the beams most
  };
  int width = 0;             // 0: none
  float length_penalty = 1;  // an output's score is its log probability / length^penalty
  Stop stop = Stop::heuristic;
};

// How the next token is chosen. Every field is honoured; validate() refuses values outside the stated range by name.
struct SamplingParams {
  int max_new_tokens = 1000;  // >= 1; 0: nothing but prompt_logprobs
  int min_new_tokens = 0;     // no stop token or stop word ends the sequence before this many
  float temperature = 1;      // >= 0; 0: greedy
  int top_k = 0;              // >= 0; 0: off, 1: greedy
  float top_p = 1;            // in [0, 1]; 1: off, 0: greedy
  float min_p = 0;            // in [0, 1]; 0: off
  // RTP-LLM's (FasterTransformer's) factual nucleus: top_p falls by `decay` with every token, to `min` at least, and begins anew
  // behind one of the tokens named.
  float top_p_decay = 1;    // in (0, 1]
  float top_p_min = 1e-6f;  // in (0, 1]
  std::vector<int32_t> top_p_reset_ids;
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
  int prompt_logprobs = -1;                           // the same of every prompt token but the first
  bool return_logits = false;                         // with every token, the logits that it was chosen from, before any edit
  std::vector<int32_t> select_tokens;                 // of which tokens; empty: of all
  bool return_hidden_states = false;                  // with every token, the row that those logits were computed from
  RareSamplers rare;
  BeamParams beams;

  void validate(int64_t vocab) const;
};

struct Request {
  std::vector<int32_t> prompt;  // token ids, at least one
  SamplingParams params;
  int sequences = 1;           // outputs wanted; they share the prompt's pages. Of a beam search, the best ones
  int priority = 0;            // lower runs first
  double timeout_seconds = 0;  // from submission; 0: none
  std::string cache_salt;      // requests with different salts never share cached pages
  uint64_t grammar = 0;        // whose masks (engine/token_mask.h) say which tokens may come next; 0: all may
  // Prompt tokens from this one on have positions that are `segment_shift` higher: a second segment's rows in a table of positions.
  int64_t segment_start = std::numeric_limits<int64_t>::max();
  int64_t segment_shift = 0;
};

enum class FinishReason : uint8_t { none, stop, length, cancelled, timeout, error };

struct TokenLogprobs {
  float logprob = 0;                           // of the token that was chosen (or stands there), from the unmodified logits
  int32_t rank = 0;                            // of a prompt's token: 1 for the most likely one
  std::vector<std::pair<int32_t, float>> top;  // the most likely tokens, best first
};

// News of one sequence: what was generated since the last event, and how it ended, if it did.
struct Event {
  uint64_t request = 0;
  int32_t sequence = 0;  // 0 .. Request::sequences - 1
  std::vector<int32_t> tokens;
  std::vector<TokenLogprobs> logprobs;  // as many as tokens, if asked for
  // If asked for, of the next tokens of the prompt: chunk by chunk, by the request's first output, before any token.
  std::vector<TokenLogprobs> prompt_logprobs;
  std::vector<float> logits, hidden_states;  // if asked for: (vocab, or select_tokens), (hidden), of the last of `tokens`
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
