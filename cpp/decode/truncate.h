// Stages that reshape a row of logits or drop tokens from it (-infinity), where few requests ask for them. Each takes a row whose
// largest logit is finite and leaves at least one token.
// p: the probabilities of the row as it is; H: their entropy, -sum p ln p.
#pragma once

#include "decode/sampler.h"

namespace maga {

// The row's forms of top_k, top_p and min_p in sampler.h.
void keep_top_k(MutableRow row, int k, std::vector<Candidate>* scratch);
void keep_top_p(MutableRow row, float top_p, std::vector<Candidate>* scratch);
void keep_min_p(MutableRow row, float min_p);
// Drops p < a * max(p)^2 (KoboldAI).
void top_a(MutableRow row, float a);
// Drops p < epsilon (Hewitt et al. 2022, "Truncation sampling as language model desmoothing").
void epsilon_cutoff(MutableRow row, float epsilon);
// Drops p < min(eta, sqrt(eta) * exp(-H)) (the same paper).
void eta_cutoff(MutableRow row, float eta);
// Drops logits below max - n * their standard deviation (Tang et al. 2024, "Top-n-sigma"); dropped ones do not count for it.
void top_n_sigma(MutableRow row, float n);
// Keeps the shortest run of tokens, by |-ln p - H|, whose probability reaches `mass` (Meister et al. 2022, "Locally typical
// sampling").
void typical(MutableRow row, float mass, std::vector<Candidate>* scratch);
// Best first, adds up the normalised |second differences| of p, and drops what comes after the sum exceeds z (Phénix and Egan 2019,
// "Tail free sampling").
void tail_free(MutableRow row, float z, std::vector<Candidate>* scratch);
// min + (max - min) * (H / ln(tokens left))^exponent: the temperature for this row (kalomaze, "dynamic temperature").
float dynamic_temperature(Row row, float min, float max, float exponent);
// With d = logit - max: max - k d^2 + s d^3, k = factor (3 - curve) / 2, s = factor (curve - 1) / 2 (kalomaze, "quadratic
// sampling").
void quadratic(MutableRow row, float factor, float curve);
// If two tokens or more have p >= threshold, drops all of them but the least likely (p-e-w, text-generation-webui #6335, "exclude
// top choices"). The caller decides how often.
void exclude_top(MutableRow row, float threshold);
// Best first, the cumulated probabilities to the power of e^skew: above 0, less likely tokens gain (turboderp, exllamav2).
void skew(MutableRow row, float skew, std::vector<Candidate>* scratch);

// -log2 p of a logit of the row as it was given.
class SurpriseOf {
 public:
  explicit SurpriseOf(Row row);
  float operator()(float logit) const;

 private:
  double log_sum_ = 0;
};
// Drops tokens with -log2 p > mu (Basu et al. 2020, "Mirostat", its second algorithm; mu is the caller's to keep).
void drop_surprising(MutableRow row, float mu);

}  // namespace maga
