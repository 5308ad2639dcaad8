// Most stages drop what is below a bar; those that need an order sort what is left.
#include "decode/truncate.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/check.h"

namespace maga {
namespace {

constexpr float kDropped = -std::numeric_limits<float>::infinity();

struct Odds {
  float max = 0;
  double total = 0;  // of exp(logit - max)
  double probability(float logit) const { return exp_negative(logit - max) / total; }
  double log_total() const { return std::log(total); }
};

Odds odds_of(Row row) {
  const float max = scan(row).max;
  return {max, exp_sum(row, max, nullptr)};
}

void drop_below(MutableRow row, double bar, float max) {
  const float lowest = std::min(static_cast<float>(bar), max);
  for (float& logit : row) logit = logit < lowest ? kDropped : logit;
}

double entropy(Row row, const Odds& odds) {
  double weighted = 0;  // sum of exp(d) * d
  for (const float logit : row) {
    const float d = logit - odds.max;
    const float weight = exp_negative(d);
    if (weight > 0) weighted += static_cast<double>(weight) * d;
  }
  return odds.log_total() - weighted / odds.total;
}

void keep_only(MutableRow row, std::span<const Candidate> kept) {
  std::fill(row.begin(), row.end(), kDropped);
  for (const Candidate& candidate : kept) row[candidate.id] = candidate.logit;
}

}  // namespace

void keep_top_k(MutableRow row, int k, std::vector<Candidate>* scratch) {
  top_k(row, k, scratch);
  keep_only(row, *scratch);
}

void keep_top_p(MutableRow row, float p, std::vector<Candidate>* scratch) {
  top_p(row, scan(row).max, p, scratch);
  keep_only(row, *scratch);
}

void keep_min_p(MutableRow row, float p) {
  const float max = scan(row).max;
  drop_below(row, max + std::log(p), max);
}

void top_a(MutableRow row, float a) {
  const Odds odds = odds_of(row);  // max(p) = 1 / total
  drop_below(row, odds.max + std::log(a / odds.total), odds.max);
}

void epsilon_cutoff(MutableRow row, float epsilon) {
  const Odds odds = odds_of(row);
  drop_below(row, odds.max + std::log(epsilon * odds.total), odds.max);
}

void eta_cutoff(MutableRow row, float eta) {
  const Odds odds = odds_of(row);
  const double bar = std::min<double>(eta, std::sqrt(eta) * std::exp(-entropy(row, odds)));
  drop_below(row, odds.max + std::log(bar * odds.total), odds.max);
}

void top_n_sigma(MutableRow row, float n) {
  double sum = 0, squares = 0;
  int64_t count = 0;
  const float max = scan(row).max;
  for (const float logit : row) {
    if (logit == kDropped) continue;
    const double d = static_cast<double>(logit) - max;
    sum += d;
    squares += d * d;
    ++count;
  }
  if (count < 2) return;
  const double variance = (squares - sum * sum / static_cast<double>(count)) / static_cast<double>(count - 1);
  drop_below(row, max - n * std::sqrt(std::max(0.0, variance)), max);
}

void typical(MutableRow row, float mass, std::vector<Candidate>* scratch) {
  const Odds odds = odds_of(row);
  const double h = entropy(row, odds);
  tokens_from(row, std::numeric_limits<float>::lowest(), scratch);
  const auto distance = [&](float logit) { return std::abs(odds.log_total() + odds.max - logit - h); };
  std::sort(scratch->begin(), scratch->end(), [&](const Candidate& a, const Candidate& b) {
    const double first = distance(a.logit), second = distance(b.logit);
    return first < second || (first == second && a.id < b.id);
  });
  double sum = 0;
  size_t kept = 0;
  while (kept < scratch->size() && (kept == 0 || sum < mass)) sum += odds.probability((*scratch)[kept++].logit);
  keep_only(row, std::span(*scratch).first(kept));
}

void tail_free(MutableRow row, float z, std::vector<Candidate>* scratch) {
  const Odds odds = odds_of(row);
  best_tokens(row, static_cast<int64_t>(row.size()), scratch);
  // What was dropped before has p = 0, and at most two such tokens make a difference.
  const size_t left = scratch->size(), tokens = std::min(row.size(), left + 2);
  if (tokens < 3) return;
  const auto p = [&](size_t i) { return i < left ? odds.probability((*scratch)[i].logit) : 0; };
  const auto bend = [&](size_t i) { return std::abs(p(i + 2) - 2 * p(i + 1) + p(i)); };
  double total = 0, sum = 0;
  for (size_t i = 0; i + 2 < tokens; ++i) total += bend(i);
  if (total == 0) return;
  size_t kept = 1;
  for (; kept + 1 < tokens; ++kept)
    if ((sum += bend(kept - 1)) / total > z) break;
  keep_only(row, std::span(*scratch).first(std::min(kept, left)));
}

float dynamic_temperature(Row row, float min, float max, float exponent) {
  const auto left = std::count_if(row.begin(), row.end(), [](float logit) { return logit != kDropped; });
  if (left < 2) return max;
  const double share = entropy(row, odds_of(row)) / std::log(static_cast<double>(left));
  return static_cast<float>(min + (max - min) * std::pow(std::clamp(share, 0.0, 1.0), exponent));
}

void quadratic(MutableRow row, float factor, float curve) {
  const float max = scan(row).max;
  const float k = factor * (3 - curve) / 2, s = factor * (curve - 1) / 2;
  for (float& logit : row) {
    if (logit == kDropped) continue;
    const float d = logit - max;
    logit = max + d * d * (s * d - k);
  }
}

void exclude_top(MutableRow row, float threshold) {
  const Odds odds = odds_of(row);
  const auto among = [&](float logit) {
    const double p = odds.probability(logit);
    return p > 0 && p >= threshold;  // what is dropped or out of reach is no choice, whatever the threshold
  };
  size_t count = 0, least = 0;
  for (size_t i = 0; i < row.size(); ++i)
    if (among(row[i]) && (count++ == 0 || row[i] <= row[least])) least = i;
  if (count < 2) return;
  for (size_t i = 0; i < row.size(); ++i)
    if (i != least && among(row[i])) row[i] = kDropped;
}

void skew(MutableRow row, float skew, std::vector<Candidate>* scratch) {
  const Odds odds = odds_of(row);
  best_tokens(row, static_cast<int64_t>(row.size()), scratch);
  const double power = std::exp(static_cast<double>(skew));
  double sum = 0, before = 0;
  for (Candidate& candidate : *scratch) {
    sum = std::min(1.0, sum + odds.probability(candidate.logit));
    const double now = std::pow(sum, power);
    candidate.logit = now > before ? static_cast<float>(std::log(now - before)) : kDropped;
    before = now;
  }
  keep_only(row, *scratch);
}

SurpriseOf::SurpriseOf(Row row) {
  const Odds odds = odds_of(row);
  log_sum_ = odds.log_total() + odds.max;
}

float SurpriseOf::operator()(float logit) const { return static_cast<float>((log_sum_ - logit) / std::log(2.0)); }

void drop_surprising(MutableRow row, float mu) {
  const Odds odds = odds_of(row);
  drop_below(row, odds.max + odds.log_total() - mu * std::log(2.0), odds.max);
}

}  // namespace maga
