// See ops.h. Each function states one op; fused ops are stated as the plain ops that they stand for, on copies.
#include "backends/reference/ops.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <numeric>

#include "core/codes.h"
#include "program/access.h"

namespace maga::reference {
namespace {

// A value of its own, for what a fused op does not keep.
struct Scratch {
  std::vector<double> elements;
  Columns columns;

  Scratch(int64_t rows, int64_t width) : elements(rows * width), columns{elements.data(), width, width} {}
  Scratch(int64_t rows, const Columns& source) : Scratch(rows, source.width) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < source.width; ++c) columns.at(r, c) = source.at(r, c);
  }
};

// Where the step's tokens are: token t of sequence s is entry `index` of its keys and values.
template <typename Body>
void for_each_token(const Step& step, Body&& body) {
  for (int64_t s = 0; s < step.sequences(); ++s) {
    const int64_t begin = step.sequence_start[s], end = step.sequence_start[s + 1];
    for (int64_t t = begin; t < end; ++t) body(s, t, step.kv_length[s] - (end - t));
  }
}

struct Slot {
  int32_t page;
  int64_t slot;
};

Slot slot_of(const Step& step, int64_t sequence, int64_t index, int64_t page_tokens) {
  return {step.pages[step.page_start[sequence] + index / page_tokens], index % page_tokens};
}

// --- plain ops over rows ---

void linear(int64_t rows, Columns out, Columns in, const DoubleWeight& weight, const DoubleWeight* bias) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t o = 0; o < out.width; ++o) {
      double sum = bias ? bias->at(0, o) : 0;
      for (int64_t i = 0; i < in.width; ++i) sum += in.at(r, i) * weight.at(o, i);
      out.at(r, o) = sum;
    }
}

struct NormOptions {
  NormKind kind;
  int64_t group;
  double eps, weight_offset;
};

void norm(int64_t rows, Columns out, Columns in, const DoubleWeight* weight, const DoubleWeight* bias, const NormOptions& options) {
  const int64_t n = options.group;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t g = 0; g < in.width; g += n) {
      double mean = 0;
      if (options.kind == NormKind::layer) {
        for (int64_t i = 0; i < n; ++i) mean += in.at(r, g + i);
        mean /= static_cast<double>(n);
      }
      double squares = 0;
      for (int64_t i = 0; i < n; ++i) squares += (in.at(r, g + i) - mean) * (in.at(r, g + i) - mean);
      const double inverse = 1 / std::sqrt(squares / static_cast<double>(n) + options.eps);
      const auto of_run = [&](const DoubleWeight& w, int64_t i) { return w.at(0, w.cols == n ? i : g + i); };
      for (int64_t i = 0; i < n; ++i) {
        double y = (in.at(r, g + i) - mean) * inverse;
        if (weight) y *= of_run(*weight, i) + options.weight_offset;
        if (bias) y += of_run(*bias, i);
        out.at(r, g + i) = y;
      }
    }
}

// The frequency of pair `i` for a token at `position` of a sequence whose prompt has `prompt` tokens. Dynamic NTK (the "dynamic"
// rope scaling of transformers) and Qwen's grow the base; like the frequencies of the table, the result is kept in fp32.
float frequency(const RopeTable& table, int64_t i, int64_t prompt, int64_t position) {
  const int64_t length = table.stepped ? prompt : std::max(prompt, position + 1);
  if (!table.by_length() || length <= table.max_positions) return table.inv_freq[i];
  if (!table.long_inv_freq.empty()) return table.long_inv_freq[i];
  const double r = static_cast<double>(table.rotary_dim);
  const double factor = table.dynamic_factor, ratio = static_cast<double>(length) / static_cast<double>(table.max_positions);
  const double stretch = table.stepped ? std::exp2(std::ceil(std::log2(ratio) + 1)) - 1 : factor * ratio - (factor - 1);
  const double base = table.theta * std::pow(stretch, r / (r - 2));
  return static_cast<float>(std::pow(base, -2.0 * static_cast<double>(i) / r));
}

void rope(Columns x, int64_t head_dim, int64_t offset, const RopeTable& table, const Step& step) {
  const int64_t half = table.rotary_dim / 2;
  for_each_token(step, [&](int64_t s, int64_t t, int64_t) {
    const int64_t position = (table.by_block ? step.block_positions : step.positions)[t];
    const int64_t prompt = step.prompt_length.empty() ? 0 : step.prompt_length[s];
    for (int64_t i = 0; i < half; ++i) {
      // An fp32 product, as models are trained with it: at position 10000 its rounding already moves the angle by up to 5e-4.
      const double angle = static_cast<float>(position) * frequency(table, i, prompt, position);
      const double cosine = std::cos(angle) * table.multiplier, sine = std::sin(angle) * table.multiplier;
      for (int64_t head = offset; head < x.width; head += head_dim) {
        double& first = x.at(t, head + (table.interleaved ? 2 * i : i));
        double& second = x.at(t, head + (table.interleaved ? 2 * i + 1 : i + half));
        const double a = first, b = second;
        first = a * cosine - b * sine;
        second = b * cosine + a * sine;
      }
    }
  });
}

// What is left of `count` numbers in codes that share a scale.
void round_to_codes(double* x, int64_t count, DType type, float given) {
  double most = 0;
  for (int64_t i = 0; i < count; ++i) most = std::isnan(x[i]) || std::isnan(most) ? NAN : std::max(most, std::abs(x[i]));
  const float largest = largest_code(type);
  const float scale = bf16_to_float(code_scale(static_cast<float>(most), largest, type == DType::f8_e4m3 ? given : 0));
  for (int64_t i = 0; i < count; ++i) {
    const float y = static_cast<float>(x[i]) * code_inverse(scale);
    const float code = type == DType::i8        ? std::nearbyint(std::clamp(y, -largest, largest))
                       : type == DType::f8_e4m3 ? e4m3_to_float(float_to_e4m3(y))
                                                : e5m2_to_float(float_to_e5m2(y));
    x[i] = double{code} * scale;
  }
}

void write_pages(LayerPages& layer, Columns k, Columns v, const Step& step) {
  for_each_token(step, [&](int64_t s, int64_t t, int64_t index) {
    const auto [page, slot] = slot_of(step, s, index, layer.page_tokens);
    layer.write(page, slot, k.row(t), v.row(t));
  });
}

struct AttentionExtras {
  const std::vector<float>* slopes = nullptr;
  const DoubleWeight* sinks = nullptr;
};

// Whether token t, the `index`-th of its sequence, sees the key of index j.
bool sees(const Step& step, int64_t s, int64_t t, int64_t index, int64_t j) {
  const int64_t first_new = step.kv_length[s] - (step.sequence_start[s + 1] - step.sequence_start[s]);
  if (!step.context.empty() && j < step.context[s]) return true;
  return step.tree.empty() || j < first_new ? j <= index : (step.tree[t] >> (j - first_new) & 1) != 0;
}

void attend(LayerPages& layer, const Attention& op, const AttentionExtras& extras, Columns out, Columns q, const Step& step) {
  const int64_t head_dim = layer.shape.head_dim, v_dim = layer.shape.v_dim;
  std::vector<double> weights;
  for_each_token(step, [&](int64_t s, int64_t t, int64_t index) {
    const int64_t first = op.window == 0 ? 0 : std::max<int64_t>(0, index - op.window + 1);
    const int64_t end = step.tree.empty() && step.context.empty() ? index + 1 : step.kv_length[s];
    for (int64_t head = 0; head < op.heads; ++head) {
      const int64_t kv_head = head / (op.heads / op.kv_heads);
      weights.clear();
      for (int64_t j = first; j < end; ++j) {
        const auto [page, slot] = slot_of(step, s, j, layer.page_tokens);
        const double* key = layer.key(page, slot) + kv_head * head_dim;
        double score = 0;
        for (int64_t c = 0; c < head_dim; ++c) score += q.at(t, head * head_dim + c) * key[c];
        score *= op.scale;
        if (op.soft_cap > 0) score = op.soft_cap * std::tanh(score / op.soft_cap);
        if (extras.slopes) score += (*extras.slopes)[head] * static_cast<double>(j - index);
        weights.push_back(sees(step, s, t, index, j) ? score : -std::numeric_limits<double>::infinity());
      }
      double largest = *std::max_element(weights.begin(), weights.end());
      if (extras.sinks) largest = std::max(largest, extras.sinks->at(0, head));
      double sum = extras.sinks ? std::exp(extras.sinks->at(0, head) - largest) : 0;
      for (double& weight : weights) sum += weight = std::exp(weight - largest);
      for (int64_t c = 0; c < v_dim; ++c) out.at(t, head * v_dim + c) = 0;
      for (int64_t j = first; j < end; ++j) {
        if (!sees(step, s, t, index, j)) continue;  // what lies there may be anything
        const auto [page, slot] = slot_of(step, s, j, layer.page_tokens);
        const double* value = layer.value(page, slot, kv_head);
        for (int64_t c = 0; c < v_dim; ++c) out.at(t, head * v_dim + c) += weights[j - first] / sum * value[c];
      }
    }
  });
}

double activate(ActivationKind kind, double x) {
  switch (kind) {
    case ActivationKind::silu: return x / (1 + std::exp(-x));
    case ActivationKind::gelu: return 0.5 * x * (1 + std::erf(x / std::numbers::sqrt2));
    case ActivationKind::gelu_tanh: return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
    case ActivationKind::relu: return x < 0 ? 0 : x;  // NaN stays NaN
    case ActivationKind::relu2: return x < 0 ? 0 : x * x;
  }
  return x;
}

void activation(int64_t rows, Columns out, Columns gate, const Columns* up, ActivationKind kind) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < out.width; ++c) out.at(r, c) = activate(kind, gate.at(r, c)) * (up ? up->at(r, c) : 1);
}

void add(int64_t rows, Columns out, Columns a, Columns b) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < out.width; ++c) out.at(r, c) = a.at(r, c) + b.at(r, c);
}

// --- mixture of experts ---

// Whether expert a comes before b, of choices in which b does not come earlier by index.
bool before(double a, double b) { return std::isnan(a) ? !std::isnan(b) : a > b; }

std::vector<int64_t> order_of(const std::vector<double>& choice) {
  std::vector<int64_t> order(choice.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return before(choice[a], choice[b]); });
  return order;
}

struct Chosen {
  int64_t expert;
  double weight;
};

std::vector<Chosen> route(const Routing& r, const std::vector<double>& logits, const std::vector<float>* correction) {
  std::vector<double> score(logits), choice(logits);
  if (r.score == ScoreKind::sigmoid) {
    for (double& x : score) x = 1 / (1 + std::exp(-x));
  } else {
    const double largest = *std::max_element(score.begin(), score.end());
    double sum = 0;
    for (double& x : score) sum += x = std::exp(x - largest);
    for (double& x : score) x /= sum;
  }
  if (correction)
    for (int64_t e = 0; e < r.experts; ++e) choice[e] = score[e] + (*correction)[e];

  const int64_t size = r.experts / r.groups;
  std::vector<double> best;
  for (int64_t g = 0; g < r.groups; ++g) {
    std::vector<double> group(choice.begin() + g * size, choice.begin() + (g + 1) * size);
    std::sort(group.begin(), group.end(), before);
    best.push_back(std::accumulate(group.begin() + 1, group.begin() + r.group_best, group[0]));
  }
  std::vector<bool> kept(r.groups);
  const std::vector<int64_t> groups = order_of(best);
  for (int64_t i = 0; i < r.top_groups; ++i) kept[groups[i]] = true;

  std::vector<Chosen> chosen;
  double sum = 0;
  for (const int64_t e : order_of(choice)) {
    if (!kept[e / size] || static_cast<int64_t>(chosen.size()) == r.top_k) continue;
    chosen.push_back({e, score[e]});
    sum += score[e];
  }
  for (Chosen& c : chosen) c.weight *= (r.renormalise ? 1 / sum : 1) * r.scale;
  return chosen;
}

double gated(const Gating& gating, double gate, double up) {
  const double limit = gating.limit;
  if (limit > 0) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
  }
  const double act =
      gating.kind == ActivationKind::silu ? gate / (1 + std::exp(-gating.alpha * gate)) : activate(gating.kind, gate);
  return act * (up + gating.up_offset);
}

// --- ops of the program ---

struct Runner {
  Machine& m;
  const Step& step;
  int64_t rows;  // of the op's output

  void operator()(const Embed& op) const {
    const Columns out = m.columns(op.out);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t id = step.ids[r], vocab = m.program.vocab;
      for (int64_t c = 0; c < out.width; ++c)
        out.at(r, c) = id < vocab ? m.weight(op.table)->at(id, c) * op.scale : m.weight(op.virtual_table)->at(id - vocab, c);
    }
  }

  void operator()(const AddPositions& op) const {
    const Columns out = m.columns(op.out), in = m.columns(op.in);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < out.width; ++c)
        out.at(r, c) = in.at(r, c) + m.weight(op.table)->at(step.positions[r] / op.divisor + op.offset, c);
  }

  void operator()(const LogScale& op) const {
    const Columns x = m.columns(op.x);
    for (int64_t r = 0; r < rows; ++r) {
      const double factor = std::log(step.positions[r] + 1.0) / std::log(static_cast<double>(op.from));
      for (int64_t c = 0; c < x.width; ++c) x.at(r, c) *= std::max(1.0, factor);
    }
  }

  void operator()(const Bound& op) const {
    const Columns out = m.columns(op.out), in = m.columns(op.in);
    const double limit = op.limit;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < out.width; ++c) {
        const double x = in.at(r, c);
        out.at(r, c) = op.kind == BoundKind::tanh ? limit * std::tanh(x / limit) : std::clamp(x, -limit, limit);  // NaN stays NaN
      }
  }

  void operator()(const Norm& op) const {
    norm(rows, m.columns(op.out), m.columns(op.in), m.weight(op.weight), m.weight(op.bias),
         {op.kind, op.group, op.eps, op.weight_offset});
  }

  void operator()(const Linear& op) const {
    if (!op.residual) return linear(rows, m.columns(op.out), m.columns(op.in), *m.weight(op.weight), m.weight(op.bias));
    const Scratch product(rows, op.out.width);
    linear(rows, product.columns, m.columns(op.in), *m.weight(op.weight), m.weight(op.bias));
    add(rows, m.columns(op.out), product.columns, m.columns(op.residual));
  }

  void operator()(const HeadLinear& op) const {
    const Columns out = m.columns(op.out), in = m.columns(op.in);
    const DoubleWeight& weight = *m.weight(op.weight);
    const int64_t in_head = in.width / op.heads, out_head = out.width / op.heads, products = weight.rows / op.heads;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t head = 0; head < op.heads; ++head)
        for (int64_t o = 0; o < out_head; ++o) {
          double& y = out.at(r, head * out_head + o);
          y = o < products ? 0 : in.at(r, head * in_head + weight.cols + o - products);
          for (int64_t i = 0; i < weight.cols && o < products; ++i)
            y += in.at(r, head * in_head + i) * weight.at(head * products + o, i);
        }
  }

  void operator()(const Rope& op) const { rope(m.columns(op.x), op.head_dim, op.offset, m.program.rope_tables[op.table], step); }

  void operator()(const Attention& op) const {
    if (op.k) write_pages(m.layers[op.layer], m.columns(op.k), op.v ? m.columns(op.v) : Columns{}, step);
    attend(m.layers[op.layer], op,
           {.slopes = op.alibi == kNone ? nullptr : &m.program.alibi_slopes[op.alibi], .sinks = m.weight(op.sinks)},
           m.columns(op.out), m.columns(op.q), step);
  }

  void operator()(const Activation& op) const {
    const Columns up = op.up ? m.columns(op.up) : Columns{};
    activation(rows, m.columns(op.out), m.columns(op.gate), op.up ? &up : nullptr, op.kind);
  }

  void operator()(const Add& op) const { add(rows, m.columns(op.out), m.columns(op.a), m.columns(op.b)); }

  void operator()(const Select& op) const {
    const Columns out = m.columns(op.out), in = m.columns(op.in);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < out.width; ++c) out.at(r, c) = in.at(step.logit_rows[r], c);
  }

  void operator()(const Pool& op) const {
    const Columns out = m.columns(op.out), in = m.columns(op.in);
    for (int64_t r = 0; r < rows; ++r) {
      const auto [begin, end] = step.brought_with(step.logit_rows[r]);
      for (int64_t c = 0; c < out.width; ++c) {
        double sum = 0;
        for (int64_t t = begin; t < end; ++t) sum += in.at(t, c);
        out.at(r, c) = op.kind == PoolKind::first  ? in.at(begin, c)
                       : op.kind == PoolKind::last ? in.at(step.logit_rows[r], c)
                                                   : sum / static_cast<double>(end - begin);
      }
    }
  }

  void operator()(const Moe& op) const {
    const Columns in = m.columns(op.in), logits = m.columns(op.logits), out = m.columns(op.out);
    const DoubleWeight &gate_up = *m.weight(op.gate_up), &down = *m.weight(op.down);
    const DoubleWeight *gate_up_bias = m.weight(op.gate_up_bias), *down_bias = m.weight(op.down_bias);
    for (int64_t r = 0; r < rows; ++r) {
      std::vector<double> sum(out.width), both(2 * op.width), hidden(op.width);
      for (int64_t c = 0; c < out.width && op.residual; ++c) sum[c] = m.columns(op.residual).at(r, c);
      for (const Chosen& chosen : route(op.routing, {&logits.at(r, 0), &logits.at(r, 0) + logits.width},
                                        op.routing.correction == kNone ? nullptr : &m.program.corrections[op.routing.correction])) {
        for (int64_t o = 0; o < 2 * op.width; ++o) {
          const int64_t row = chosen.expert * 2 * op.width + o;
          both[o] = gate_up_bias ? gate_up_bias->at(0, row) : 0;
          for (int64_t i = 0; i < in.width; ++i) both[o] += in.at(r, i) * gate_up.at(row, i);
        }
        for (int64_t i = 0; i < op.width; ++i) hidden[i] = gated(op.gating, both[i], both[op.width + i]);
        for (int64_t o = 0; o < out.width; ++o) {
          const int64_t row = chosen.expert * out.width + o;
          double y = down_bias ? down_bias->at(0, row) : 0;
          for (int64_t i = 0; i < op.width; ++i) y += hidden[i] * down.at(row, i);
          sum[o] += chosen.weight * y;
        }
      }
      for (int64_t o = 0; o < out.width; ++o) out.at(r, o) = sum[o];
    }
  }

  void operator()(const GatedLinear& op) const {
    const Scratch both(rows, 2 * op.out.width);
    linear(rows, both.columns, m.columns(op.in), *m.weight(op.weight), m.weight(op.bias));
    const Columns gate = both.columns.part(0, op.out.width), up = both.columns.part(op.out.width, op.out.width);
    activation(rows, m.columns(op.out), gate, &up, op.kind);
  }

  void operator()(const PrepareQkv& op) const {
    const Columns q = m.columns(op.q);
    const Scratch k(rows, m.columns(op.k));
    const NormOptions options{NormKind::rms, op.head_dim, op.eps, op.weight_offset};
    if (op.q_norm != kNone) norm(rows, q, q, m.weight(op.q_norm), nullptr, options);
    if (op.k_norm != kNone) norm(rows, k.columns, k.columns, m.weight(op.k_norm), nullptr, options);
    if (op.rope_table != kNone)
      for (const Columns& x : {q, k.columns}) rope(x, op.head_dim, 0, m.program.rope_tables[op.rope_table], step);
    write_pages(m.layers[op.layer], k.columns, m.columns(op.v), step);
  }
};

}  // namespace

void LayerPages::write(int32_t page, int64_t slot, const double* token_keys, const double* token_values) {
  std::copy_n(token_keys, shape.kv_heads * shape.head_dim, key(page, slot));
  if (!shape.values_in_keys) std::copy_n(token_values, shape.kv_heads * shape.v_dim, value(page, slot));
  for (int64_t head = 0; is_code(dtype) && head < shape.kv_heads; ++head) {
    round_to_codes(key(page, slot) + head * shape.head_dim, shape.head_dim, dtype, shape.k_scale);
    round_to_codes(value(page, slot) + head * shape.v_dim, shape.v_dim, dtype, shape.v_scale);
  }
}

void run(Machine& machine, const Op& op, const Step& step) {
  const bool tokens = machine.program.values[written(op).value].rows == Rows::tokens;
  std::visit(Runner{machine, step, tokens ? step.tokens() : static_cast<int64_t>(step.logit_rows.size())}, op);
}

}  // namespace maga::reference
