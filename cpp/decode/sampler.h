// How the next token is chosen from a row of logits: stages, each a function over one row, and the chain that runs them.
//
// Order: repetition, presence and frequency penalty, logit_bias, the grammar's mask, bad_words, min_new_tokens, temperature, top_k,
// top_p, min_p, draw. A request with RareSamplers goes through decode/stages.h instead.
// To add a sampler: a stage in truncate.h or repeat.h, its call in stages.cpp, and its field in RareSamplers.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "decode/row.h"
#include "engine/request.h"

namespace maga {

using MutableRow = std::span<float>;

// How often each token occurred, for the penalties. Only sequences with a penalty keep one.
class TokenCounts {
 public:
  struct Count {
    int32_t token = 0;
    int32_t output = 0;  // occurrences in the output; 0: in the prompt only
  };
  void add_prompt(std::span<const int32_t> tokens);
  void add_output(int32_t token);
  std::span<const Count> counts() const { return counts_; }

 private:
  Count& of(int32_t token);
  std::vector<Count> counts_;  // by token
};

// --- Stages that change the row in place ---

void repetition_penalty(MutableRow row, const TokenCounts& counts, float penalty);
void presence_penalty(MutableRow row, const TokenCounts& counts, float penalty);
void frequency_penalty(MutableRow row, const TokenCounts& counts, float penalty);
void logit_bias(MutableRow row, std::span<const std::pair<int32_t, float>> bias);
// Bans the last token of each word whose other tokens are the last of `tokens` (prompt and output).
void ban_bad_words(MutableRow row, std::span<const std::vector<int32_t>> words, std::span<const int32_t> tokens);
void ban_tokens(MutableRow row, std::span<const int32_t> tokens);
// Bans all but those whose bit (t % 32 of word t / 32) is set.
void allow_tokens(MutableRow row, std::span<const uint32_t> allowed);
// (logit - max) / temperature: the largest becomes 0, so that no temperature overflows.
void temperature(MutableRow row, float max, float temperature);

// --- Stages that choose candidates. They take logits whose largest is `max`. ---

// The k best tokens, best first.
void top_k(Row row, int k, std::vector<Candidate>* candidates);
// The smallest set of best tokens whose probability reaches p, best first; at least one.
void top_p(Row row, float max, float p, std::vector<Candidate>* candidates);
// The same among candidates (best first), whose probabilities are taken to add up to 1.
void top_p(std::vector<Candidate>* candidates, float p);
// The tokens whose probability is at least p times that of the best: of the whole row by id, or among candidates (best first).
void min_p(Row row, float max, float p, std::vector<Candidate>* candidates);
void min_p(std::vector<Candidate>* candidates, float p);

// The token at `u` in [0, 1) of the cumulative distribution: over candidates in their order, or over the whole row by id.
int32_t draw(std::span<const Candidate> candidates, double u);
int32_t draw(Row row, float max, double u, std::vector<double>* blocks);

// log_softmax of the row at `token`, and of the `top` most likely tokens.
TokenLogprobs logprobs(Row row, float max, int32_t token, int top, std::vector<Candidate>* candidates);

// --- The chain ---

struct SampleInput {
  Row logits;
  const SamplingParams* params = nullptr;
  const TokenCounts* counts = nullptr;  // needed if the params have a penalty
  std::span<const int32_t> tokens;      // prompt and output
  int64_t output_tokens = 0;            // how many of `tokens` are output
  std::span<const uint32_t> allowed;    // as allow_tokens; empty: all tokens
  uint64_t seed = 0;
  uint64_t stream = 0;    // which of the request's sequences
  float mirostat_mu = 0;  // of the sequence, with mirostat
};

struct Sampled {
  enum class Status : uint8_t {
    ok,
    non_finite,  // the row has NaN or +infinity, or nothing but -infinity
    no_token,    // penalties, bias and bans leave no token that can be chosen
  };
  Status status = Status::ok;
  int32_t token = 0;
  TokenLogprobs logprobs;  // empty unless asked for
  float surprise = 0;      // -log2 of the token's probability, with mirostat
};

// Memory that `sample` reuses; one a thread.
struct SampleScratch {
  std::vector<float> row;
  std::vector<Candidate> candidates;
  std::vector<double> blocks;
};

bool has_penalty(const SamplingParams& params);
bool is_greedy(const SamplingParams& params);
// Whether a stage before temperature has something to do for the token that follows `output_tokens` others.
bool edits_logits(const SamplingParams& params, int64_t output_tokens);
// Whether only the host can choose that token: a device knows the stages of backends/draw.h.
bool needs_host(const SamplingParams& params, int64_t output_tokens);
// top_p as it has fallen; behind so many tokens, where there are no top_p_reset_ids.
float top_p_of(const SampleInput& input);
float top_p_behind(const SamplingParams& params, int64_t output_tokens);
// The penalties and logit_bias; what grammar, bad_words and min_new_tokens ban.
void penalize(MutableRow row, const SampleInput& input);
void ban(MutableRow row, const SampleInput& input);
// The draw depends only on the arguments: neither on the batch nor on the thread.
void sample(const SampleInput& input, SampleScratch* scratch, Sampled* out);

}  // namespace maga
