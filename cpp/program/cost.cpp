// FLOPs count a multiplication, an addition or a function call as one each. Activations are not counted as bytes: they stay
// in caches, where weights and K/V do not.
#include "program/cost.h"

#include <algorithm>

#include "program/access.h"

namespace maga {
namespace {

class Costing {
 public:
  Costing(const Program& program, const Workload& work, const std::vector<double>& weight_bytes)
      : p_(program), work_(work), weight_bytes_(weight_bytes) {}

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

  OpCost cost(const Rope& op) const { return {.flops = rope_flops(op.table, op.x.width / op.head_dim)}; }

  OpCost cost(const Attention& op) const {
    const CacheLayer& layer = p_.cache_layers[op.layer];
    const double last = work_.context + work_.tokens_per_sequence;
    // The i-th new token sees the context, its predecessors in the step and itself, as far as the window reaches.
    double pairs = 0;
    for (int64_t i = 0; i < work_.tokens_per_sequence; ++i) pairs += seen(work_.context + i + 1, op.window);
    pairs *= work_.sequences;
    const double entries = work_.tokens_per_sequence == 0 ? 0
                           : op.window == 0               ? last
                                                          : std::min<double>(last, op.window + work_.tokens_per_sequence - 1);
    OpCost total;
    // Products with k and v, and for the softmax: scale, maximum, difference, exponential, sum.
    total.flops = pairs * op.heads * (2.0 * layer.head_dim + 2.0 * layer.v_dim + 5);
    total.kv_bytes = work_.sequences * entries * entry_bytes(layer);
    if (op.k) total.kv_bytes += rows_ * entry_bytes(layer);
    return total;
  }

  OpCost cost(const Activation& op) const { return {.flops = rows_ * op.out.width * (op.up ? 2.0 : 1.0)}; }
  OpCost cost(const Add& op) const { return {.flops = rows_ * op.out.width}; }
  OpCost cost(const Select&) const { return {}; }

  OpCost cost(const GatedLinear& op) const {
    const double per_output = 2 * (2.0 * op.in.width + (op.bias != kNone)) + 2;
    return {.flops = rows_ * op.out.width * per_output, .weight_bytes = read(op.weight) + read(op.bias)};
  }

  OpCost cost(const PrepareQkv& op) const {
    OpCost total;
    total.weight_bytes = read(op.q_norm) + read(op.k_norm);
    total.kv_bytes = rows_ * entry_bytes(p_.cache_layers[op.layer]);
    if (op.q_norm != kNone) total.flops += rows_ * op.q.width * 4;
    if (op.k_norm != kNone) total.flops += rows_ * op.k.width * 4;
    if (op.rope_table != kNone) total.flops += rope_flops(op.rope_table, op.heads + op.kv_heads);
    return total;
  }

  double rope_flops(int32_t table, int64_t heads) const { return rows_ * heads * p_.rope_tables[table].rotary_dim * 3; }

  double entry_bytes(const CacheLayer& layer) const {
    return static_cast<double>(layer.kv_heads * (layer.head_dim + layer.v_dim) * work_.kv_element_bytes);
  }

  static double seen(int64_t keys, int64_t window) { return static_cast<double>(window == 0 ? keys : std::min(keys, window)); }

  // A weight is read once a step, unless the step has no row for it.
  double read(WeightId id) const { return id == kNone || rows_ == 0 ? 0 : weight_bytes_[id]; }

  double rows_of(const View& view) const {
    const bool tokens = p_.values[view.value].rows == Rows::tokens;
    return static_cast<double>(tokens ? work_.sequences * work_.tokens_per_sequence : work_.logit_rows);
  }

  const Program& p_;
  const Workload& work_;
  const std::vector<double>& weight_bytes_;
  double rows_ = 0;  // of the op at hand
};

}  // namespace

std::vector<OpCost> cost(const Program& program, const Workload& work, const std::vector<double>& weight_bytes) {
  MAGA_REQUIRE(weight_bytes.size() == program.weights.size(), weight_bytes.size(), " sizes for ", program.weights.size(),
               " weights");
  MAGA_REQUIRE(work.sequences >= 0 && work.tokens_per_sequence >= 0 && work.context >= 0 && work.logit_rows >= 0 &&
                   work.kv_element_bytes > 0,
               "a workload needs sizes that are not negative");
  Costing costing(program, work, weight_bytes);
  std::vector<OpCost> costs;
  costs.reserve(program.ops.size());
  for (const Op& op : program.ops) costs.push_back(costing.of(op));
  return costs;
}

double floor_seconds(const OpCost& total, double bytes_per_second, double flops_per_second) {
  return std::max((total.weight_bytes + total.kv_bytes) / bytes_per_second, total.flops / flops_per_second);
}

}  // namespace maga
