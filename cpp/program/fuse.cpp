// The fusing pass. A rule fires only when the plain ops' intermediate columns have no other reader and nothing between the
// ops that it joins changes what the fused op, which runs where the last of them ran, reads.
#include "program/fuse.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "program/access.h"

namespace maga {
namespace {

class Fusion {
 public:
  explicit Fusion(const Program& program) : p_(program), ops_(p_.ops) {}

  Program run(FusedOps allowed) {
    // Every rule replaces op `at` and removes ops before it, so `at` moves back by the number removed.
    for (int at = 0; at < static_cast<int>(ops_.size()); ++at) {
      if (allowed.gated_linear && std::holds_alternative<Activation>(ops_[at])) at -= gated_linear(at);
      if (allowed.linear_residual && std::holds_alternative<Add>(ops_[at])) at -= linear_residual(at);
      if (allowed.prepare_qkv && std::holds_alternative<Attention>(ops_[at])) at -= prepare_qkv(at);
    }
    return std::move(p_);
  }

 private:
  // Linear to (gate | up), Activation -> GatedLinear.
  int gated_linear(int at) {
    const auto act = std::get<Activation>(ops_[at]);
    if (!act.up) return 0;
    const View both{act.gate.value, act.gate.offset, 2 * act.gate.width};
    if (act.up != View{both.value, both.offset + act.gate.width, act.gate.width}) return 0;
    const int from = writer(both, at);
    const Linear* linear = from < 0 ? nullptr : std::get_if<Linear>(&ops_[from]);
    if (!linear || linear->residual || overlap(linear->in, act.out)) return 0;
    if (touched(both, from + 1, at) || changed(linear->in, from + 1, at) || !dead_after(both, at)) return 0;
    ops_[at] = GatedLinear{.out = act.out, .in = linear->in, .weight = linear->weight, .bias = linear->bias, .kind = act.kind};
    return remove({from});
  }

  // Linear or Moe, Add -> the same with residual.
  int linear_residual(int at) {
    const auto add = std::get<Add>(ops_[at]);
    for (const auto& [sum, other] : {std::pair{add.a, add.b}, std::pair{add.b, add.a}}) {
      const int from = writer(sum, at);
      if (from < 0 || overlap(sum, other) || touched(sum, from + 1, at) || !dead_after(sum, at)) continue;
      const Views in = reads(ops_[from]);
      const bool free =
          std::none_of(in.begin(), in.end(), [&](const View& v) { return overlap(v, add.out) || changed(v, from + 1, at); });
      if (!free || !(add_residual<Linear>(from, at, add.out, other) || add_residual<Moe>(from, at, add.out, other))) continue;
      return remove({from});
    }
    return 0;
  }

  template <typename Product>
  bool add_residual(int from, int at, const View& out, const View& residual) {
    const Product* product = std::get_if<Product>(&ops_[from]);
    if (!product || product->residual) return false;
    Product fused = *product;
    fused.out = out;
    fused.residual = residual;
    ops_[at] = fused;
    return true;
  }

  // [Norm, Norm], [Rope, Rope], Attention -> PrepareQkv, Attention. Takes as many of the norms and ropes as it can.
  int prepare_qkv(int at) {
    auto attention = std::get<Attention>(ops_[at]);
    if (!attention.k || !attention.v) return 0;
    for (const bool ropes : {true, false})
      for (const bool norms : {true, false}) {
        const Chain q = trace(attention.q, attention, at, norms, ropes);
        const Chain k = trace(attention.k, attention, at, norms, ropes);
        const auto fused = join(q, k, attention, at);
        if (!fused) continue;
        attention.q = fused->q;
        attention.k = attention.v = {};
        ops_[at] = *fused;
        ops_.insert(ops_.begin() + at + 1, attention);
        return remove({q.norm, q.rope, k.norm, k.rope}) - 1;
      }
    return 0;
  }

  // The norm and rope that end in `end`, the view that the attention reads; `source` is what they start from.
  struct Chain {
    View source, end;
    int norm = kNone, rope = kNone;
    int first(int at) const { return norm >= 0 ? norm : rope >= 0 ? rope : at; }
    bool has(int i) const { return i == norm || i == rope; }
  };

  Chain trace(const View& end, const Attention& attention, int at, bool norms, bool ropes) const {
    Chain chain{.source = end, .end = end};
    if (ropes) {
      const int i = writer(end, at);
      const Rope* rope = i < 0 ? nullptr : std::get_if<Rope>(&ops_[i]);
      if (rope && rope->head_dim == attention.head_dim && rope->offset == 0) chain.rope = i;
    }
    if (norms) {
      const int i = writer(end, chain.first(at));
      const Norm* norm = i < 0 ? nullptr : std::get_if<Norm>(&ops_[i]);
      if (norm && norm->kind == NormKind::rms && norm->weight != kNone && norm->bias == kNone &&
          norm->group == attention.head_dim && p_.weights[norm->weight].shape[0] == norm->group) {
        chain.norm = i;
        chain.source = norm->in;
      }
    }
    return chain;
  }

  std::optional<PrepareQkv> join(const Chain& q, const Chain& k, const Attention& attention, int at) const {
    PrepareQkv fused{.q = q.source, .k = k.source, .v = attention.v, .layer = attention.layer};
    fused.heads = attention.heads;
    fused.kv_heads = attention.kv_heads;
    fused.head_dim = attention.head_dim;

    if ((q.rope >= 0) != (k.rope >= 0)) return {};
    if (q.rope >= 0) {
      fused.rope_table = std::get<Rope>(ops_[q.rope]).table;
      if (std::get<Rope>(ops_[k.rope]).table != fused.rope_table) return {};
    }
    const Norm* q_norm = q.norm < 0 ? nullptr : &std::get<Norm>(ops_[q.norm]);
    const Norm* k_norm = k.norm < 0 ? nullptr : &std::get<Norm>(ops_[k.norm]);
    if (q_norm && k_norm && (q_norm->eps != k_norm->eps || q_norm->weight_offset != k_norm->weight_offset)) return {};
    if (q_norm) fused.q_norm = q_norm->weight;
    if (k_norm) fused.k_norm = k_norm->weight;
    if (const Norm* norm = q_norm ? q_norm : k_norm) {
      fused.eps = norm->eps;
      fused.weight_offset = norm->weight_offset;
    }

    // The fused op changes q where it starts, and leaves k as it was; the plain ops changed `end`.
    if (overlap(q.source, attention.out)) return {};
    for (const View& mine : {q.source, q.end})
      for (const View& other : {k.source, k.end, attention.v})
        if (overlap(mine, other)) return {};
    for (const Chain* chain : {&q, &k}) {
      if (chain->norm < 0 && chain->rope < 0) continue;
      if (overlap(chain->end, attention.v)) return {};
      for (int i = chain->first(at) + 1; i < at; ++i) {
        if (q.has(i) || k.has(i)) continue;
        if (touches(ops_[i], chain->end) || touches(ops_[i], chain->source)) return {};
      }
      const bool end_kept = chain == &q && chain->source == chain->end;
      if (!end_kept && !dead_after(chain->end, at)) return {};
      if (chain == &q && chain->source != chain->end && !dead_after(chain->source, at)) return {};
    }
    return fused;
  }

  // --- what ops do to columns ---

  // The last op before `at` that wrote any of `view`, if it wrote exactly that; else kNone.
  int writer(const View& view, int at) const {
    for (int i = at - 1; i >= 0; --i)
      if (const View out = written(ops_[i]); overlap(out, view)) return out == view ? i : kNone;
    return kNone;
  }

  static bool touches(const Op& op, const View& view) {
    const Views in = reads(op);
    return overlap(written(op), view) || std::any_of(in.begin(), in.end(), [&](const View& v) { return overlap(v, view); });
  }

  bool touched(const View& view, int begin, int end) const {
    return std::any_of(ops_.begin() + begin, ops_.begin() + end, [&](const Op& op) { return touches(op, view); });
  }

  bool changed(const View& view, int begin, int end) const {
    return std::any_of(ops_.begin() + begin, ops_.begin() + end, [&](const Op& op) { return overlap(written(op), view); });
  }

  // Whether nobody wants what `view` holds once op `at` has read it.
  bool dead_after(const View& view, int at) const {
    if (covers(written(ops_[at]), view)) return true;
    for (size_t i = at + 1; i < ops_.size(); ++i) {
      for (const View& in : reads(ops_[i]))
        if (overlap(in, view)) return false;
      if (covers(written(ops_[i]), view)) return true;
    }
    return view.value != p_.logits && std::find(p_.outputs.begin(), p_.outputs.end(), view.value) == p_.outputs.end();
  }

  int remove(std::vector<int> indices) {
    std::sort(indices.rbegin(), indices.rend());
    int removed = 0;
    for (const int i : indices) {
      if (i < 0) continue;
      ops_.erase(ops_.begin() + i);
      ++removed;
    }
    return removed;
  }

  Program p_;
  std::vector<Op>& ops_;
};

}  // namespace

Program fuse(const Program& program, FusedOps allowed) { return Fusion(program).run(allowed); }

}  // namespace maga
