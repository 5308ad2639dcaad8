// Vectorised passes over one row of logits.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace maga {

using Row = std::span<const float>;

struct RowScan {
  float max = 0;       // -infinity when every logit is
  int32_t argmax = 0;  // the lowest id of the largest logit
  bool finite = true;  // no NaN, no +infinity, and not all -infinity
};
RowScan scan(Row row);

// exp(x) for x <= 0 with a relative error below 2e-7; 0 below -87.
float exp_negative(float x);

// 1 + how many logits are larger than the token's.
int32_t rank(Row row, int32_t token);

// Sum of exp(logit - max), added up in blocks; `blocks` (may be null) receives the sum of each run of kSumBlock logits.
constexpr int64_t kSumBlock = 256;
double exp_sum(Row row, float max, std::vector<double>* blocks);

struct Candidate {
  int32_t id = 0;
  float logit = 0;
  // Best first; equal logits by id, so that a result never depends on how it was computed.
  bool operator<(const Candidate& other) const { return logit > other.logit || (logit == other.logit && id < other.id); }
};

// All tokens whose logit is at least `bar`, by id.
void tokens_from(Row row, float bar, std::vector<Candidate>* tokens);

// The `count` best tokens of the row, best first, without sorting the row. Tokens at -infinity are never among them.
void best_tokens(Row row, int64_t count, std::vector<Candidate>* best);

}  // namespace maga
