// Program::validate: everything that backends rely on, checked once, with messages that name the op and the value.
#include "program/program.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "program/access.h"

namespace maga {
namespace {

std::string_view name_of(Rows rows) { return rows == Rows::tokens ? "a row per token" : "a row per logits row"; }

class Validation {
 public:
  explicit Validation(const Program& program) : p_(program) {
    for (const Value& value : p_.values) written_.emplace_back(std::max<int64_t>(value.width, 0), false);
    layer_writer_.assign(p_.cache_layers.size(), kNone);
  }

  void run() {
    declarations();
    for (; index_ < static_cast<int>(p_.ops.size()); ++index_) {
      for (const View& view : reads(p_.ops[index_])) readable(view);
      inside(written(p_.ops[index_]));
      std::visit([this](const auto& op) { check(op); }, p_.ops[index_]);
      const View out = written(p_.ops[index_]);
      std::fill_n(written_[out.value].begin() + out.offset, out.width, true);
    }
    results();
  }

 private:
  // --- what stands outside the list of ops ---

  void declarations() {
    for (const Value& value : p_.values)
      MAGA_REQUIRE(value.width > 0, "value \"", value.name, "\" is ", value.width, " columns wide");
    for (const WeightSpec& weight : p_.weights)
      MAGA_REQUIRE(!weight.shape.empty() && weight.shape.size() <= 3 &&
                       std::all_of(weight.shape.begin(), weight.shape.end(), [](int64_t n) { return n > 0; }),
                   "weight \"", weight.name, "\" has shape ", shape_text(weight.shape), "; it needs one to three positive sizes");
    for (size_t i = 0; i < p_.rope_tables.size(); ++i) rope_table(p_.rope_tables[i], i);
    for (size_t i = 0; i < p_.cache_layers.size(); ++i) {
      const CacheLayer& layer = p_.cache_layers[i];
      MAGA_REQUIRE(layer.kv_heads > 0 && layer.head_dim > 0 && layer.v_dim > 0, "cache layer ", i, " has kv_heads ", layer.kv_heads,
                   ", head_dim ", layer.head_dim, ", v_dim ", layer.v_dim, "; all must be positive");
      MAGA_REQUIRE(!layer.values_in_keys || layer.v_dim <= layer.head_dim, "cache layer ", i, " has values of ", layer.v_dim,
                   " in keys of ", layer.head_dim);
      for (const float scale : {layer.k_scale, layer.v_scale})
        MAGA_REQUIRE(scale >= 0 && std::isfinite(scale), "cache layer ", i, " has a scale of ", scale);
    }
    for (const ValueId input : p_.inputs) {
      MAGA_REQUIRE(is_value(input), "an input names value ", input, " of ", p_.values.size());
      written_[input].assign(written_[input].size(), true);
    }
  }

  static bool all_finite(const std::vector<float>& values) {
    return std::all_of(values.begin(), values.end(), [](float f) { return std::isfinite(f); });
  }

  void rope_table(const RopeTable& table, size_t index) const {
    const int64_t r = table.rotary_dim;
    MAGA_REQUIRE(r > 0 && r % 2 == 0, "rope table ", index, " has rotary_dim ", r, "; it must be positive and even");
    MAGA_REQUIRE(static_cast<int64_t>(table.inv_freq.size()) == r / 2, "rope table ", index, " has ", table.inv_freq.size(),
                 " frequencies for rotary_dim ", r, "; it needs ", r / 2);
    MAGA_REQUIRE(all_finite(table.inv_freq) && std::isfinite(table.multiplier), "rope table ", index,
                 " has a frequency or multiplier that is not finite");
    if (!table.by_length()) return;
    MAGA_REQUIRE((table.dynamic_factor != 0) + table.stepped + !table.long_inv_freq.empty() == 1 && table.max_positions > 0,
                 "rope table ", index, " changes with the length in more than one way, or from max_positions ",
                 table.max_positions);
    if (!table.long_inv_freq.empty()) {
      MAGA_REQUIRE(table.long_inv_freq.size() == table.inv_freq.size() && all_finite(table.long_inv_freq), "rope table ", index,
                   " has ", table.long_inv_freq.size(), " frequencies for long sequences; it needs ", r / 2, " finite ones");
      return;
    }
    MAGA_REQUIRE((table.stepped || table.dynamic_factor >= 1) && table.theta > 0 && r > 2, "rope table ", index,
                 " is dynamic with factor ", table.dynamic_factor, ", theta ", table.theta, ", max_positions ", table.max_positions,
                 ", rotary_dim ", r, "; it needs a factor of at least 1, positive theta and max_positions, and rotary_dim above 2");
  }

  void results() const {
    for (const ValueId output : p_.outputs) {
      MAGA_REQUIRE(is_value(output), "an output names value ", output, " of ", p_.values.size());
      MAGA_REQUIRE(all_written(output), "output \"", p_.values[output].name, "\" is never written, or only in part");
    }
    if (p_.logits == kNone) return;
    MAGA_REQUIRE(is_value(p_.logits), "logits names value ", p_.logits, " of ", p_.values.size());
    const Value& logits = p_.values[p_.logits];
    MAGA_REQUIRE(logits.rows == Rows::logits && (p_.embeds || logits.width == p_.vocab), "logits \"", logits.name, "\" is ",
                 logits.width, " wide with ", name_of(logits.rows), "; it needs the vocabulary's ", p_.vocab,
                 " columns and a row per logits row");
    MAGA_REQUIRE(all_written(p_.logits), "logits \"", logits.name, "\" is never written, or only in part");
  }

  // --- one overload an op; views are inside their values and what is read has been written ---

  void check(const Embed& op) {
    rows(op.out, Rows::tokens);
    matrix("table", op.table, p_.vocab, op.out.width);
    require(std::isfinite(op.scale), "scale is ", op.scale);
    require((op.virtual_table != kNone) == (p_.virtual_tokens > 0), "virtual_table is ", op.virtual_table, " with ",
            p_.virtual_tokens, " virtual tokens");
    if (op.virtual_table != kNone) matrix("virtual_table", op.virtual_table, p_.virtual_tokens, op.out.width);
  }

  void check(const AddPositions& op) {
    rows(op.out, Rows::tokens);
    rows(op.in, Rows::tokens);
    equal_width("in", op.in, op.out.width);
    in_place_or_apart("in", op.in, op.out);
    require(op.offset >= 0, "offset is ", op.offset);
    require(op.divisor >= 1, "divisor is ", op.divisor);
    const auto& shape = weight_of("table", op.table).shape;
    require(shape.size() == 2 && shape[1] == op.out.width && shape[0] > op.offset, "table has shape ", shape_text(shape),
            "; the op needs more than ", op.offset, " rows of ", op.out.width);
    require(p_.max_positions <= (shape[0] - op.offset) * op.divisor, "the program has ", p_.max_positions, " positions, the table ",
            shape[0] - op.offset);
  }

  void check(const LogScale& op) {
    rows(op.x, Rows::tokens);
    require(op.from > 1, "from is ", op.from, "; it needs to be above 1");
  }

  void check(const Bound& op) {
    same_rows(op.in, op.out);
    equal_width("in", op.in, op.out.width);
    in_place_or_apart("in", op.in, op.out);
    require(op.limit > 0 && std::isfinite(op.limit), "limit is ", op.limit);
  }

  void check(const Norm& op) {
    same_rows(op.in, op.out);
    equal_width("in", op.in, op.out.width);
    in_place_or_apart("in", op.in, op.out);
    require(op.group > 0 && op.out.width % op.group == 0, "a group of ", op.group, " does not divide ", op.out.width, " columns");
    const WeightId given = op.weight != kNone ? op.weight : op.bias;
    const bool own = given != kNone && weight_of("weight or bias", given).shape == std::vector{op.out.width};
    vector("weight", op.weight, own ? op.out.width : op.group);
    vector("bias", op.bias, own ? op.out.width : op.group);
    epsilon(op.eps);
  }

  void check(const Linear& op) {
    same_rows(op.in, op.out);
    matrix("weight", op.weight, op.out.width, op.in.width);
    vector("bias", op.bias, op.out.width);
    apart("in", op.in, op.out);
    if (!op.residual) return;
    same_rows(op.residual, op.out);
    equal_width("residual", op.residual, op.out.width);
    in_place_or_apart("residual", op.residual, op.out);
  }

  void check(const HeadLinear& op) {
    same_rows(op.in, op.out);
    apart("in", op.in, op.out);
    const auto& shape = weight_of("weight", op.weight).shape;
    require(op.heads > 0 && op.in.width % op.heads == 0, op.heads, " heads in ", op.in.width, " columns");
    const int64_t head = op.in.width / op.heads;
    require(shape.size() == 3 && shape[0] == op.heads && shape[2] <= head, "weight has shape ", shape_text(shape),
            "; the op needs ", op.heads, " matrices of at most ", head, " columns");
    equal_width("out", op.out, op.heads * (shape[1] + head - shape[2]));
  }

  void check(const Rope& op) {
    rows(op.x, Rows::tokens);
    require(op.head_dim > 0 && op.x.width % op.head_dim == 0, "a head_dim of ", op.head_dim, " does not divide ", op.x.width,
            " columns");
    require(op.offset >= 0 && op.offset < op.head_dim, "offset is ", op.offset, " of a head_dim of ", op.head_dim);
    rope(op.table, op.head_dim - op.offset);
  }

  void check(const Attention& op) {
    const CacheLayer& layer = heads(op);
    require(bool(op.v) == (bool(op.k) && !layer.values_in_keys),
            layer.values_in_keys ? "v is given, but the layer has its values in its keys"
                                 : "k and v must both be given, or both be in the pages already");
    for (const View& view : {op.q, op.out}) rows(view, Rows::tokens);
    equal_width("q", op.q, op.heads * op.head_dim);
    equal_width("out", op.out, op.heads * layer.v_dim);
    apart("q", op.q, op.out);
    if (op.k) {
      keys_and_values(op.k, op.v, op.layer);
      apart("k", op.k, op.out);
      if (op.v) apart("v", op.v, op.out);
    }
    require(layer_writer_[op.layer] != kNone, "layer ", op.layer, " is read before any op writes its keys and values");
    require(std::isfinite(op.scale), "scale is ", op.scale);
    require(op.window >= 0, "window is ", op.window);
    require(op.soft_cap >= 0 && std::isfinite(op.soft_cap), "soft_cap is ", op.soft_cap);
    if (op.alibi != kNone) {
      require(op.alibi >= 0 && op.alibi < static_cast<int64_t>(p_.alibi_slopes.size()), "alibi names table ", op.alibi, " of ",
              p_.alibi_slopes.size());
      require(static_cast<int64_t>(p_.alibi_slopes[op.alibi].size()) == op.heads, "alibi has ", p_.alibi_slopes[op.alibi].size(),
              " slopes for ", op.heads, " heads");
    }
    vector("sinks", op.sinks, op.heads);
  }

  void check(const Activation& op) {
    same_rows(op.gate, op.out);
    equal_width("gate", op.gate, op.out.width);
    in_place_or_apart("gate", op.gate, op.out);
    if (!op.up) return;
    same_rows(op.up, op.out);
    equal_width("up", op.up, op.out.width);
    in_place_or_apart("up", op.up, op.out);
  }

  void check(const Add& op) {
    for (const View& view : {op.a, op.b}) {
      same_rows(view, op.out);
      equal_width("a term", view, op.out.width);
      in_place_or_apart("a term", view, op.out);
    }
  }

  void check(const Select& op) {
    rows(op.in, Rows::tokens);
    rows(op.out, Rows::logits);
    equal_width("in", op.in, op.out.width);
  }

  void check(const Pool& op) {
    rows(op.in, Rows::tokens);
    rows(op.out, Rows::logits);
    equal_width("in", op.in, op.out.width);
  }

  void check(const Moe& op) {
    const int64_t experts = op.routing.experts;
    for (const View& view : {op.in, op.logits}) {
      same_rows(view, op.out);
      apart("an input", view, op.out);
    }
    equal_width("logits", op.logits, experts);
    if (op.residual) {
      same_rows(op.residual, op.out);
      equal_width("residual", op.residual, op.out.width);
      in_place_or_apart("residual", op.residual, op.out);
    }
    routing(op.routing);
    require(op.width > 0, "width is ", op.width);
    weight("gate_up", op.gate_up, {experts, 2 * op.width, op.in.width});
    weight("down", op.down, {experts, op.out.width, op.width});
    vector("gate_up_bias", op.gate_up_bias, experts * 2 * op.width);
    vector("down_bias", op.down_bias, experts * op.out.width);
    const Gating& gating = op.gating;
    require(gating.limit >= 0 && std::isfinite(gating.limit) && std::isfinite(gating.up_offset), "limit is ", gating.limit,
            " and up_offset ", gating.up_offset);
    require(std::isfinite(gating.alpha) && (gating.alpha == 1 || gating.kind == ActivationKind::silu), "alpha is ", gating.alpha,
            "; other values than 1 are for silu");
  }

  void check(const GatedLinear& op) {
    same_rows(op.in, op.out);
    matrix("weight", op.weight, 2 * op.out.width, op.in.width);
    vector("bias", op.bias, 2 * op.out.width);
    apart("in", op.in, op.out);
  }

  void check(const PrepareQkv& op) {
    require(!heads(op).values_in_keys, "layer ", op.layer, " has its values in its keys");
    rows(op.q, Rows::tokens);
    equal_width("q", op.q, op.heads * op.head_dim);
    keys_and_values(op.k, op.v, op.layer);
    apart("k", op.k, op.q);
    apart("v", op.v, op.q);
    vector("q_norm", op.q_norm, op.head_dim);
    vector("k_norm", op.k_norm, op.head_dim);
    epsilon(op.eps);
    if (op.rope_table != kNone) rope(op.rope_table, op.head_dim);
  }

  // --- the parts of those checks ---

  template <typename Heads>
  const CacheLayer& heads(const Heads& op) const {
    require(op.layer >= 0 && op.layer < static_cast<int64_t>(p_.cache_layers.size()), "layer ", op.layer, " of ",
            p_.cache_layers.size(), " cache layers");
    const CacheLayer& layer = p_.cache_layers[op.layer];
    require(op.kv_heads == layer.kv_heads && op.head_dim == layer.head_dim, "kv_heads ", op.kv_heads, " and head_dim ", op.head_dim,
            ", but cache layer ", op.layer, " has ", layer.kv_heads, " and ", layer.head_dim);
    require(op.heads > 0 && op.heads % op.kv_heads == 0, op.heads, " heads over ", op.kv_heads, " kv_heads");
    return layer;
  }

  void keys_and_values(const View& k, const View& v, int32_t layer) {
    rows(k, Rows::tokens);
    equal_width("k", k, p_.cache_layers[layer].kv_heads * p_.cache_layers[layer].head_dim);
    if (!p_.cache_layers[layer].values_in_keys) {
      rows(v, Rows::tokens);
      equal_width("v", v, p_.cache_layers[layer].kv_heads * p_.cache_layers[layer].v_dim);
    }
    require(layer_writer_[layer] == kNone, "layer ", layer, " has its keys and values from op ", layer_writer_[layer], " already");
    layer_writer_[layer] = index_;
  }

  void rope(int32_t table, int64_t room) const {
    require(table >= 0 && table < static_cast<int64_t>(p_.rope_tables.size()), "rope table ", table, " of ", p_.rope_tables.size());
    require(p_.rope_tables[table].rotary_dim <= room, "rotary_dim ", p_.rope_tables[table].rotary_dim, " is above head_dim ", room);
  }

  void matrix(std::string_view role, WeightId id, int64_t out, int64_t in) const { weight(role, id, {out, in}); }

  void vector(std::string_view role, WeightId id, int64_t size) const {
    if (id != kNone) weight(role, id, {size});
  }

  void weight(std::string_view role, WeightId id, const std::vector<int64_t>& shape) const {
    const WeightSpec& spec = weight_of(role, id);
    require(spec.shape == shape, role, " \"", spec.name, "\" has shape ", shape_text(spec.shape), "; the op needs ",
            shape_text(shape));
  }

  const WeightSpec& weight_of(std::string_view role, WeightId id) const {
    require(id >= 0 && id < static_cast<int64_t>(p_.weights.size()), role, " is weight ", id, " of ", p_.weights.size());
    return p_.weights[id];
  }

  void routing(const Routing& r) const {
    require(r.experts > 0 && r.experts <= kMostExperts, r.experts, " experts; 1 to ", kMostExperts, " can be taken");
    require(r.groups > 0 && r.groups <= kMostGroups && r.experts % r.groups == 0, r.experts, " experts in ", r.groups,
            " groups; 1 to ", kMostGroups, " of one size can be taken");
    const int64_t group = r.experts / r.groups;
    require(r.top_groups > 0 && r.top_groups <= r.groups, "top_groups ", r.top_groups, " of ", r.groups);
    require(r.group_best > 0 && r.group_best <= group, "group_best ", r.group_best, " of groups of ", group);
    require(r.group_best == 1 || r.correction != kNone, "group_best ", r.group_best, " needs corrections: logits have no sum");
    require(r.top_k > 0 && r.top_k <= std::min(kMostChosen, r.top_groups * group), "top_k ", r.top_k, " of ", r.top_groups * group,
            " experts; 1 to ", kMostChosen, " can be taken");
    require(std::isfinite(r.scale), "scale is ", r.scale);
    if (r.correction == kNone) return;
    require(r.correction >= 0 && r.correction < static_cast<int64_t>(p_.corrections.size()), "correction names table ",
            r.correction, " of ", p_.corrections.size());
    require(static_cast<int64_t>(p_.corrections[r.correction].size()) == r.experts, "correction has ",
            p_.corrections[r.correction].size(), " entries for ", r.experts, " experts");
  }

  void epsilon(float eps) const { require(eps >= 0 && std::isfinite(eps), "eps is ", eps); }

  void equal_width(std::string_view role, const View& view, int64_t width) const {
    require(view.width == width, role, ' ', text(view), " is ", view.width, " columns wide; the op needs ", width);
  }

  void rows(const View& view, Rows kind) const {
    inside(view);
    require(p_.values[view.value].rows == kind, text(view), " has ", name_of(p_.values[view.value].rows), "; the op needs ",
            name_of(kind));
  }

  void same_rows(const View& in, const View& out) const {
    inside(in);
    require(p_.values[in.value].rows == p_.values[out.value].rows, text(in), " has ", name_of(p_.values[in.value].rows), ", but ",
            text(out), " has ", name_of(p_.values[out.value].rows));
  }

  void apart(std::string_view role, const View& in, const View& out) const {
    require(!overlap(in, out), role, ' ', text(in), " overlaps ", text(out), ", which the op writes");
  }

  void in_place_or_apart(std::string_view role, const View& in, const View& out) const {
    if (in != out) apart(role, in, out);
  }

  void inside(const View& view) const {
    require(is_value(view.value), "a view names value ", view.value, " of ", p_.values.size());
    require(view.offset >= 0 && view.width > 0 && view.offset + view.width <= p_.values[view.value].width, "columns [", view.offset,
            ", ", view.offset + view.width, ") are not in \"", p_.values[view.value].name, "\", which has ",
            p_.values[view.value].width);
  }

  void readable(const View& view) const {
    inside(view);
    const auto first = written_[view.value].begin() + view.offset;
    require(std::all_of(first, first + view.width, [](bool w) { return w; }), text(view), " is read before it is written");
  }

  bool is_value(ValueId id) const { return id >= 0 && id < static_cast<int64_t>(p_.values.size()); }

  bool all_written(ValueId id) const {
    return std::all_of(written_[id].begin(), written_[id].end(), [](bool w) { return w; });
  }

  static std::string shape_text(const std::vector<int64_t>& shape) {
    std::string out = "(";
    for (size_t i = 0; i < shape.size(); ++i) out += (i ? ", " : "") + std::to_string(shape[i]);
    return out + ")";
  }

  std::string text(const View& view) const {
    const Value& value = p_.values[view.value];
    if (view.offset == 0 && view.width == value.width) return concat('"', value.name, '"');
    return concat('"', value.name, "\"[", view.offset, ":", view.offset + view.width, ']');
  }

  template <typename... Parts>
  void require(bool condition, const Parts&... parts) const {
    if (condition) [[likely]]
      return;
    const View out = written(p_.ops[index_]);
    MAGA_REQUIRE(false, "op ", index_, " (", maga::name_of(p_.ops[index_]),
                 is_value(out.value) ? concat(" to \"", p_.values[out.value].name, '"') : "", "): ", parts...);
  }

  const Program& p_;
  int index_ = 0;
  std::vector<std::vector<bool>> written_;  // by value and column
  std::vector<int> layer_writer_;           // the op that writes each cache layer
};

}  // namespace

void Program::validate() const { Validation(*this).run(); }

void Program::add_virtual_tokens(WeightId table) {
  MAGA_REQUIRE(table >= 0 && table < static_cast<WeightId>(weights.size()) && weights[table].shape.size() == 2, "weight ", table,
               " of ", weights.size(), " is no table of virtual tokens: it needs two sizes");
  virtual_tokens = weights[table].shape[0];
  for (Op& op : ops)
    if (auto* embed = std::get_if<Embed>(&op)) embed->virtual_table = table;
}

namespace {

// One more than the least max_positions of the tables that are `wanted`; 0: none is.
template <typename Wanted>
int64_t first_length(const std::vector<RopeTable>& tables, Wanted&& wanted) {
  int64_t from = 0;
  for (const RopeTable& table : tables)
    if (wanted(table) && (from == 0 || table.max_positions + 1 < from)) from = table.max_positions + 1;
  return from;
}

}  // namespace

int64_t Program::length_dependent_from() const {
  return first_length(rope_tables, [](const RopeTable& table) { return table.dynamic_factor != 0 || table.stepped; });
}

int64_t Program::long_from() const {
  return first_length(rope_tables, [](const RopeTable& table) { return !table.long_inv_freq.empty(); });
}

bool Program::whole_prompts() const {
  return context.whole || row_per_token || std::any_of(ops.begin(), ops.end(), [](const Op& op) {
           const auto* pool = std::get_if<Pool>(&op);
           return pool && pool->kind != PoolKind::last;
         });
}

int64_t Program::table_positions() const {
  int64_t least = 0;
  for (const Op& op : ops)
    if (const auto* add = std::get_if<AddPositions>(&op)) {
      const int64_t positions = (weights[add->table].shape[0] - add->offset) * add->divisor;
      least = least == 0 ? positions : std::min(least, positions);
    }
  return least;
}

}  // namespace maga
