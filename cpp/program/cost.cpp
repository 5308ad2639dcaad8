// FLOPs count a multiplication, an addition or a function call as one each. Activations are not counted as bytes: they stay
// in caches, where weights and K/V do not.
#include "program/cost.h"

#include <algorithm>
#include <cmath>

#include "program/access.h"

namespace maga {
namespace {

class Costing {
 public:
  Costing(const Program& program, const Workload& work, const std::vector<double>& weight_bytes)
      : p_(program), work_(work), weight_bytes_(weight_bytes) {
    for (const SequenceWork& sequence : work.sequences) tokens_ += static_cast<double>(sequence.tokens);
  }

  OpCost of(const Op& op) {
    rows_ = rows_of(written(op));
    return std::visit([this](const auto& o) { return cost(o); }, op);
  }

 private:
  OpCost cost(const Embed& op) const {
    // A gather: only the rows of the step's tokens.
    const double share = std::min(1.0, rows_ / static_cast<double>(p_.vocab));
    return {.flops = op.scale == 1 ? 0 : rows_ * op.out.width, .weight_bytes = share * weight_bytes_[op.table]};
  }

  OpCost cost(const AddPositions& op) const {
    const double share = std::min(1.0, rows_ / static_cast<double>(p_.weights[op.table].shape[0]));
    return {.flops = rows_ * op.out.width, .weight_bytes = share * weight_bytes_[op.table]};
  }

  OpCost cost(const LogScale& op) const { return {.flops = rows_ * op.x.width}; }
  OpCost cost(const Bound& op) const { return {.flops = rows_ * op.out.width}; }

  OpCost cost(const Norm& op) const {
    const int per_element = (op.kind == NormKind::rms ? 3 : 5) + (op.weight != kNone) + (op.bias != kNone);
    return {.flops = rows_ * op.out.width * per_element, .weight_bytes = read(op.weight) + read(op.bias)};
  }

  OpCost cost(const Linear& op) const {
    const double additions = (op.bias != kNone) + bool(op.residual);
    return {.flops = rows_ * op.out.width * (2.0 * op.in.width + additions), .weight_bytes = read(op.weight) + read(op.bias)};
  }

  OpCost cost(const HeadLinear& op) const {
    const auto& shape = p_.weights[op.weight].shape;
    return {.flops = rows_ * op.heads * 2.0 * shape[1] * shape[2], .weight_bytes = read(op.weight)};
  }

  OpCost cost(const Rope& op) const { return {.flops = rope_flops(op.table, op.x.width / op.head_dim)}; }

  OpCost cost(const Attention& op) {
    const CacheLayer& layer = p_.cache_layers[op.layer];
    const Seen& seen = seen_by(op);
    OpCost total;
    // Products with k and v, and for the softmax: scale, maximum, difference, exponential, sum.
    total.flops = seen.pairs * op.heads * (2.0 * layer.head_dim + 2.0 * layer.v_dim + 5);
    total.kv_bytes = (seen.entries + (op.k ? rows_ : 0)) * entry_bytes(op.layer);
    return total;
  }

  OpCost cost(const Activation& op) const { return {.flops = rows_ * op.out.width * (op.up ? 2.0 : 1.0)}; }
  OpCost cost(const Add& op) const { return {.flops = rows_ * op.out.width}; }
  OpCost cost(const Select&) const { return {}; }
  OpCost cost(const Pool&) const { return {}; }

  OpCost cost(const Moe& op) const {
    const double experts = static_cast<double>(op.routing.experts), chosen = static_cast<double>(op.routing.top_k);
    // Of experts that tokens choose evenly and apart from each other, this share is expected to be read.
    const double touched = 1 - std::pow(1 - chosen / experts, rows_);
    const double hidden = 2 * (2.0 * op.in.width + (op.gate_up_bias != kNone)) + 2;
    const double result = 2.0 * op.width + (op.down_bias != kNone) + 2;  // times the weight, added up
    OpCost total;
    total.flops = rows_ * chosen * (op.width * hidden + op.out.width * result) + rows_ * experts * 3;
    for (const WeightId id : {op.gate_up, op.down, op.gate_up_bias, op.down_bias}) total.weight_bytes += touched * read(id);
    return total;
  }

  OpCost cost(const GatedLinear& op) const {
    const double per_output = 2 * (2.0 * op.in.width + (op.bias != kNone)) + 2;
    return {.flops = rows_ * op.out.width * per_output, .weight_bytes = read(op.weight) + read(op.bias)};
  }

  OpCost cost(const PrepareQkv& op) const {
    OpCost total;
    total.weight_bytes = read(op.q_norm) + read(op.k_norm);
    total.kv_bytes = rows_ * entry_bytes(op.layer);
    if (op.q_norm != kNone) total.flops += rows_ * op.q.width * 4;
    if (op.k_norm != kNone) total.flops += rows_ * op.k.width * 4;
    if (op.rope_table != kNone) total.flops += rope_flops(op.rope_table, op.heads + op.kv_heads);
    return total;
  }

  double rope_flops(int32_t table, int64_t heads) const { return rows_ * heads * p_.rope_tables[table].rotary_dim * 3; }

  double entry_bytes(int32_t layer) const {
    const DType type = work_.kv_dtypes.size() == 1 ? work_.kv_dtypes[0] : work_.kv_dtypes[layer];
    return static_cast<double>(p_.cache_layers[layer].entry_bytes(type));
  }

  // Of all sequences: pairs of a query and a key that it sees, and keys that any query sees.
  struct Seen {
    int64_t window = 0;
    bool open = false;
    double pairs = 0, entries = 0;
  };
  // Layers that see alike are worked out once.
  const Seen& seen_by(const Attention& op) {
    const bool open = p_.context.whole;
    for (const Seen& seen : seen_)
      if (seen.window == op.window && seen.open == open) return seen;
    Seen seen{.window = op.window, .open = open};
    for (const SequenceWork& sequence : work_.sequences) {
      if (sequence.tokens == 0) continue;
      const auto tokens = static_cast<double>(sequence.tokens), context = static_cast<double>(sequence.context);
      const auto window = static_cast<double>(op.window);
      // The i-th new token sees the context, its predecessors in the step and itself, as far as the window reaches.
      const double growing = op.window == 0 ? tokens : std::clamp(window - context, 0.0, tokens);
      seen.pairs +=
          open ? tokens * (context + tokens) : growing * context + growing * (growing + 1) / 2 + (tokens - growing) * window;
      seen.entries += op.window == 0 ? context + tokens : std::min(context + tokens, window + tokens - 1);
    }
    return seen_.emplace_back(seen);
  }

  // A weight is read once a step, unless the step has no row for it.
  double read(WeightId id) const { return id == kNone || rows_ == 0 ? 0 : weight_bytes_[id]; }

  double rows_of(const View& view) const {
    const bool tokens = p_.values[view.value].rows == Rows::tokens;
    return tokens ? tokens_ : static_cast<double>(work_.logit_rows);
  }

  const Program& p_;
  const Workload& work_;
  const std::vector<double>& weight_bytes_;
  double tokens_ = 0;
  double rows_ = 0;  // of the op at hand
  std::vector<Seen> seen_;
};

}  // namespace

std::vector<OpCost> cost(const Program& program, const Workload& work, const std::vector<double>& weight_bytes) {
  std::vector<OpCost> costs;
  cost(program, work, weight_bytes, &costs);
  return costs;
}

void cost(const Program& program, const Workload& work, const std::vector<double>& weight_bytes, std::vector<OpCost>* costs) {
  MAGA_REQUIRE(weight_bytes.size() == program.weights.size(), weight_bytes.size(), " sizes for ", program.weights.size(),
               " weights");
  MAGA_REQUIRE(work.logit_rows >= 0 && std::all_of(work.sequences.begin(), work.sequences.end(),
                                                   [](auto s) { return s.tokens >= 0 && s.context >= 0; }),
               "a workload needs sizes that are not negative");
  MAGA_REQUIRE(work.kv_dtypes.size() == 1 || work.kv_dtypes.size() == program.cache_layers.size(), work.kv_dtypes.size(),
               " types of keys and values for ", program.cache_layers.size(), " cache layers");
  Costing costing(program, work, weight_bytes);
  costs->clear();
  for (const Op& op : program.ops) costs->push_back(costing.of(op));
}

LeastSeconds least_seconds(std::span<const OpCost> costs, const Rates& rates) {
  LeastSeconds least;
  for (const OpCost& cost : costs) {
    const double arithmetic = rates.flops_per_second > 0 ? cost.flops / rates.flops_per_second : 0;
    const double weights = cost.weight_bytes / rates.bytes_per_second, kv = cost.kv_bytes / rates.bytes_per_second;
    least.all += std::max(weights + kv, arithmetic);
    least.weights += weights, least.kv += kv, least.arithmetic += arithmetic;
  }
  return least;
}

}  // namespace maga
