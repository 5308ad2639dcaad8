#include "backends/cpu/moe.h"

#include <algorithm>
#include <cmath>

namespace maga::cpu {
namespace {

// Rows of an expert at a time: what a linear takes in one pass.
constexpr int64_t kMostRows = 768;
// Floats that a thread copies or adds up at a time.
constexpr int64_t kGrainFloats = 16 * 1024;

bool before(float a, float b) { return std::isnan(a) ? !std::isnan(b) : a > b; }

// The first of the best of `count` choices that are not yet taken.
int64_t best_of(const float* choice, const bool* taken, int64_t count) {
  int64_t best = -1;
  for (int64_t i = 0; i < count; ++i)
    if (!taken[i] && (best < 0 || before(choice[i], choice[best]))) best = i;
  return best;
}

// Marks the experts of all groups but the best as taken.
void leave_groups(const Routing& r, const float* choice, bool* taken) {
  const int64_t size = r.experts / r.groups;
  float sums[kMostExperts];
  bool kept[kMostExperts] = {};
  for (int64_t g = 0; g < r.groups; ++g) {
    bool counted[kMostExperts] = {};
    sums[g] = 0;
    for (int64_t i = 0; i < r.group_best; ++i) {
      const int64_t best = best_of(choice + g * size, counted, size);
      counted[best] = true;
      sums[g] += choice[g * size + best];
    }
  }
  for (int64_t i = 0; i < r.top_groups; ++i) kept[best_of(sums, kept, r.groups)] = true;
  for (int64_t e = 0; e < r.experts; ++e) taken[e] = !kept[e / size];
}

float gated(const Gating& g, float gate, float up) {
  if (g.limit > 0) {
    gate = gate > g.limit ? g.limit : gate;
    up = up > g.limit ? g.limit : up < -g.limit ? -g.limit : up;
  }
  return gate / (1 + std::exp(-g.alpha * gate)) * (up + g.up_offset);
}

template <typename Body>
void over_rows(ThreadPool& threads, int64_t rows, int64_t width, Body&& body) {
  threads.parallel_for(rows, std::max<int64_t>(1, kGrainFloats / width), [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) body(row);
  });
}

}  // namespace

void route(const Routing& r, const float* logits, const float* correction, int32_t* experts, float* weights) {
  float score[kMostExperts], corrected[kMostExperts];
  bool taken[kMostExperts] = {};
  if (r.score == ScoreKind::sigmoid) {
    for (int64_t e = 0; e < r.experts; ++e) score[e] = 1 / (1 + std::exp(-logits[e]));
  } else {
    const float largest = *std::max_element(logits, logits + r.experts);
    float sum = 0;
    for (int64_t e = 0; e < r.experts; ++e) sum += score[e] = std::exp(logits[e] - largest);
    for (int64_t e = 0; e < r.experts; ++e) score[e] /= sum;
  }
  const float* choice = logits;
  if (correction) {
    for (int64_t e = 0; e < r.experts; ++e) corrected[e] = score[e] + correction[e];
    choice = corrected;
  }
  if (r.top_groups < r.groups) leave_groups(r, choice, taken);
  float sum = 0;
  for (int64_t i = 0; i < r.top_k; ++i) {
    const int64_t best = best_of(choice, taken, r.experts);
    taken[best] = true;
    experts[i] = static_cast<int32_t>(best);
    sum += weights[i] = score[best];
  }
  for (int64_t i = 0; i < r.top_k; ++i) weights[i] = (r.renormalise ? weights[i] / sum : weights[i]) * r.scale;
}

Experts::Experts(const Program& program, const Limits& limits) {
  const int64_t most_tokens = std::max(limits.tokens, limits.logit_rows);
  int64_t floats = 0, sums = 0, chosen = 0, experts = 0;
  most_rows_ = std::min(kMostRows, most_tokens);
  for (const Op& op : program.ops)
    if (const auto* moe = std::get_if<Moe>(&op)) {
      const int64_t hidden = moe->gating.plain() ? moe->width : 3 * moe->width;
      floats = std::max(floats, most_rows_ * (moe->in.width + hidden + moe->out.width));
      if (moe->residual) sums = std::max(sums, most_tokens * moe->out.width);
      chosen = std::max(chosen, most_tokens * moe->routing.top_k);
      experts = std::max(experts, moe->routing.experts);
    }
  if (floats == 0) return;
  memory_ = std::make_unique<Mapping>((floats + sums) * static_cast<int64_t>(sizeof(float)), "experts");
  rows_ = reinterpret_cast<float*>(memory_->data());
  sums_ = rows_ + floats;
  chosen_.resize(chosen);
  weights_.resize(chosen);
  entries_.resize(chosen);
  expert_start_.resize(experts + 1);
}

void Experts::run(ThreadPool& threads, Isa isa, std::byte* linear_scratch, const MoeCall& call) {
  const Moe& op = *call.op;
  over_rows(threads, call.tokens, op.routing.experts * (op.routing.top_k + 16), [&](int64_t token) {
    const int64_t at = token * op.routing.top_k;
    route(op.routing, call.logits + token * call.logits_stride, call.correction, &chosen_[at], &weights_[at]);
  });
  sort(call);
  // The residual comes last, so that fusing it changes no result.
  const Sums sums = call.residual ? Sums{sums_, op.out.width} : Sums{call.out, call.out_stride};
  over_rows(threads, call.tokens, op.out.width, [&](int64_t token) { std::fill_n(sums.of(token), op.out.width, 0.0f); });
  for (int64_t e = 0; e < op.routing.experts; ++e)
    for (int64_t first = expert_start_[e]; first < expert_start_[e + 1]; first += most_rows_)
      run_expert(threads, isa, linear_scratch, call, e,
                 {&entries_[first], static_cast<size_t>(std::min(most_rows_, expert_start_[e + 1] - first))}, sums);
  if (call.residual)
    over_rows(threads, call.tokens, op.out.width, [&](int64_t token) {
      const float *sum = sums.of(token), *residual = call.residual + token * call.residual_stride;
      float* out = call.out + token * call.out_stride;
      for (int64_t i = 0; i < op.out.width; ++i) out[i] = sum[i] + residual[i];
    });
}

// By counting.
void Experts::sort(const MoeCall& call) {
  const Routing& r = call.op->routing;
  const int64_t count = call.tokens * r.top_k;
  std::fill(expert_start_.begin(), expert_start_.end(), 0);
  for (int64_t i = 0; i < count; ++i) ++expert_start_[chosen_[i]];
  int64_t end = 0;
  for (int64_t& start : expert_start_) end += start, start = end;
  // From the ends down, so that the ends become the starts and tokens stay in order.
  for (int64_t i = count - 1; i >= 0; --i) entries_[--expert_start_[chosen_[i]]] = {static_cast<int32_t>(i / r.top_k), weights_[i]};
}

void Experts::run_expert(ThreadPool& threads, Isa isa, std::byte* linear_scratch, const MoeCall& call, int64_t expert,
                         std::span<const Entry> entries, const Sums& sums) {
  const Moe& op = *call.op;
  const auto rows = static_cast<int64_t>(entries.size());
  float* x = rows_;                              // (rows, in)
  float* result = x + rows * op.in.width;        // (rows, out)
  float* hidden = result + rows * op.out.width;  // (rows, width)
  float* both = hidden + rows * op.width;        // (rows, 2 * width), where the gating is not plain
  over_rows(threads, rows, op.in.width,
            [&](int64_t row) { std::copy_n(call.x + entries[row].token * call.x_stride, op.in.width, x + row * op.in.width); });
  const bool plain = op.gating.plain();
  linear(threads, isa, linear_scratch,
         {.weight = &call.gate_up->matrix(expert),
          .x = x,
          .x_stride = op.in.width,
          .tokens = rows,
          .out = plain ? hidden : both,
          .out_stride = plain ? op.width : 2 * op.width,
          .bias = call.gate_up_bias ? call.gate_up_bias + expert * 2 * op.width : nullptr,
          .gated = plain,
          .activation = op.gating.kind,
          .quantize_activations = call.quantize_activations});
  if (!plain)
    over_rows(threads, rows, op.width, [&](int64_t row) {
      const float* gate = both + row * 2 * op.width;
      for (int64_t i = 0; i < op.width; ++i) hidden[row * op.width + i] = gated(op.gating, gate[i], gate[op.width + i]);
    });
  linear(threads, isa, linear_scratch,
         {.weight = &call.down->matrix(expert),
          .x = hidden,
          .x_stride = op.width,
          .tokens = rows,
          .out = result,
          .out_stride = op.out.width,
          .bias = call.down_bias ? call.down_bias + expert * op.out.width : nullptr,
          .quantize_activations = call.quantize_activations});
  over_rows(threads, rows, op.out.width, [&](int64_t row) {
    float* out = sums.of(entries[row].token);
    const float* y = result + row * op.out.width;
    for (int64_t i = 0; i < op.out.width; ++i) out[i] += entries[row].weight * y[i];
  });
}

}  // namespace maga::cpu
