// The ops that a program is made of. Each is a plain struct; a backend runs them over a Step (program/step.h).
//
// A value is a ragged matrix: one row per token of the step (or, after Select, per row that needs logits).
// A View names columns of a value, so that one fused linear can produce q, k and v without a copy.
#pragma once

#include <cstdint>
#include <string_view>
#include <variant>

namespace maga {

using ValueId = int32_t;
using WeightId = int32_t;
constexpr int32_t kNone = -1;

struct View {
  ValueId value = kNone;
  int64_t offset = 0;  // first column
  int64_t width = 0;   // columns
  explicit operator bool() const { return value != kNone; }
  bool operator==(const View&) const = default;
};

enum class NormKind : uint8_t { rms, layer };
enum class ActivationKind : uint8_t { silu, gelu, gelu_tanh, relu, relu2 };  // relu2: the square of relu
enum class BoundKind : uint8_t { clamp, tanh };
enum class PoolKind : uint8_t { first, last, mean };
enum class ScoreKind : uint8_t { softmax, sigmoid };

// out[t] = table[ids[t]] * scale, or virtual_table[ids[t] - vocab] of the ids behind the vocabulary
struct Embed {
  View out;
  WeightId table = kNone;  // (vocab, width)
  float scale = 1;
  WeightId virtual_table = kNone;  // (Program::virtual_tokens, width)
};

// out[t] = in[t] + table[position of t / divisor + offset]: learned positions, or segments of `divisor` positions
struct AddPositions {
  View out, in;
  WeightId table = kNone;  // (positions / divisor + offset, width)
  int64_t offset = 0;
  int64_t divisor = 1;
};

// Normalises each run of `group` columns: the whole row, or each head. y = x / rms(x) * (weight + weight_offset) + bias;
// `layer` subtracts the mean first.
struct Norm {
  View out, in;
  WeightId weight = kNone;  // (group), the same for each run, or (out.width), each run's own
  WeightId bias = kNone;    // as the weight
  NormKind kind = NormKind::rms;
  float eps = 0;
  float weight_offset = 0;
  int64_t group = 0;
};

// out = in · weightᵀ + bias + residual
struct Linear {
  View out, in;
  WeightId weight = kNone;  // (out.width, in.width)
  WeightId bias = kNone;    // (out.width)
  View residual;            // may be `out` itself
};

// Each head's own product. A head's run of `in` is (x, rest), x as wide as its matrix has columns; its run of `out` is
// (weight[head] · x, rest).
struct HeadLinear {
  View out, in;
  WeightId weight = kNone;  // (heads, rows, cols)
  int64_t heads = 0;
};

// Rotates `rotary_dim` columns of every head, from `offset` on, in place, by the frequencies of `Program::rope_tables[table]`.
struct Rope {
  View x;
  int64_t head_dim = 0;
  int32_t table = kNone;
  int64_t offset = 0;
};

// x[t] *= max(1, log(position of t + 1) / log(from)), in place: of queries, it keeps attention sharp over contexts beyond `from`.
struct LogScale {
  View x;
  int64_t from = 0;
};

// Writes k and v of the step's tokens into the pages of `layer`, then attends: causal, over all earlier tokens of each sequence,
// but for the step's `tree` and `context`.
// With `k` and `v` empty the keys and values are in the pages already (see PrepareQkv); with `v` alone empty the values are in the
// keys (see CacheLayer). A score is, in this order: q · k * scale;
// soft_cap * tanh(score / soft_cap); + slope * (index of the key - index of the query).
struct Attention {
  View out;      // (tokens, heads * v_dim)
  View q, k, v;  // (tokens, heads * head_dim), (tokens, kv_heads * head_dim), (tokens, kv_heads * v_dim)
  int32_t layer = 0;
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  float scale = 1;
  int64_t window = 0;      // a query sees this many keys, itself included; 0: all
  float soft_cap = 0;      // 0: none
  int32_t alibi = kNone;   // of Program::alibi_slopes
  WeightId sinks = kNone;  // (heads) a score a head that takes part in the softmax and has no value
};

// out = act(gate) * up; without `up`, out = act(gate)
struct Activation {
  View out, gate, up;
  ActivationKind kind = ActivationKind::silu;
};

// out = a + b
struct Add {
  View out, a, b;
};

// clamp: out = in, no further from 0 than `limit`; tanh: out = limit * tanh(in / limit)
struct Bound {
  View out, in;
  BoundKind kind = BoundKind::clamp;
  float limit = 0;
};

// Keeps the rows of the step that need logits.
struct Select {
  View out, in;
};

// For each row that needs logits, of the tokens that its sequence brings: the first one's row, its own, or the mean of all.
struct Pool {
  View out, in;
  PoolKind kind = PoolKind::first;
};

constexpr int64_t kMostExperts = 512, kMostChosen = 32, kMostGroups = 32;

// How a router's logits choose experts and weigh them.
//
// An expert's score is the softmax over all experts, or the sigmoid of its logit. Its choice is score + correction or, without
// corrections, the logit, which orders experts as scores do and is exact. Experts stand in `groups` runs of one size; those
// `top_groups` of them take part whose `group_best` largest choices have the largest sum. Of their experts the `top_k` with the
// largest choices are chosen. Of equals the one of lower index comes first, and NaN counts as larger than any number. A chosen
// expert's weight is its score, divided by the sum of the chosen scores if `renormalise`, times `scale`.
struct Routing {
  int64_t experts = 0, top_k = 0;
  ScoreKind score = ScoreKind::softmax;
  int32_t correction = kNone;  // of Program::corrections
  int64_t groups = 1, top_groups = 1, group_best = 1;
  bool renormalise = false;
  float scale = 1;
};

// act(g) * (u + up_offset) with g = min(gate, limit), u = up held in [-limit, limit]. silu(g) is g * sigmoid(alpha * g).
struct Gating {
  ActivationKind kind = ActivationKind::silu;
  float alpha = 1;
  float limit = 0;  // 0: none
  float up_offset = 0;
  bool plain() const { return alpha == 1 && limit == 0 && up_offset == 0; }
};

// A mixture of experts: out = residual + the sum over the chosen experts of weight * down(gating(gate(in), up(in))).
struct Moe {
  View out, in, logits;           // logits: (tokens, routing.experts)
  View residual;                  // may be `out` itself
  WeightId gate_up = kNone;       // (experts, 2 * width, in.width): of each expert the gate rows, then the up rows
  WeightId down = kNone;          // (experts, out.width, width)
  WeightId gate_up_bias = kNone;  // (experts * 2 * width)
  WeightId down_bias = kNone;     // (experts * out.width)
  int64_t width = 0;              // of an expert's hidden layer
  Routing routing;
  Gating gating;
};

// --- Fused ops. `fuse` makes them; each equals the plain ops named in its comment. ---

// Linear to (gate | up), then Activation. `weight` holds the gate rows, then the up rows.
struct GatedLinear {
  View out, in;
  WeightId weight = kNone;  // (2 * out.width, in.width)
  WeightId bias = kNone;    // (2 * out.width)
  ActivationKind kind = ActivationKind::silu;
};

// Norm of each head of q and of k (where a weight is given), Rope of both (where a table is given), and the write of k and v
// into the pages of `layer`. q changes in place; what is left in k and v is the backend's affair: nothing else may read them.
struct PrepareQkv {
  View q, k, v;
  WeightId q_norm = kNone, k_norm = kNone;  // (head_dim)
  float eps = 0;
  float weight_offset = 0;
  int32_t rope_table = kNone;
  int32_t layer = 0;
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
};

using Op = std::variant<Embed, Norm, Linear, Rope, Attention, Activation, Add, Select, GatedLinear, PrepareQkv, AddPositions,
                        LogScale, Bound, Pool, Moe, HeadLinear>;

constexpr std::string_view kOpNames[] = {"embed", "norm",   "linear",       "rope",        "attention",     "activation",
                                         "add",   "select", "gated_linear", "prepare_qkv", "add_positions", "log_scale",
                                         "bound", "pool",   "moe",          "head_linear"};
static_assert(std::size(kOpNames) == std::variant_size_v<Op>);

inline std::string_view name_of(const Op& op) { return kOpNames[op.index()]; }

}  // namespace maga
