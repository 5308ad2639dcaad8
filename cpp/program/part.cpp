#include "program/part.h"

#include <algorithm>
#include <limits>

#include "core/check.h"
#include "core/overloaded.h"
#include "program/access.h"

namespace maga {
namespace {

template <typename F>
void for_each_weight(Op* op, F f) {
  const auto all = [&](auto&... ids) { (f(&ids), ...); };
  std::visit(
      Overloaded{[&](Embed& o) { all(o.table, o.virtual_table); }, [&](AddPositions& o) { all(o.table); },
                 [&](Norm& o) { all(o.weight, o.bias); }, [&](Linear& o) { all(o.weight, o.bias); },
                 [&](HeadLinear& o) { all(o.weight); }, [&](Attention& o) { all(o.sinks); },
                 [&](Moe& o) { all(o.gate_up, o.down, o.gate_up_bias, o.down_bias); },
                 [&](GatedLinear& o) { all(o.weight, o.bias); }, [&](PrepareQkv& o) { all(o.q_norm, o.k_norm); }, [](Rope&) {},
                 [](LogScale&) {}, [](Bound&) {}, [](Activation&) {}, [](Add&) {}, [](Select&) {}, [](Pool&) {}},
      *op);
}

int32_t* cache_layer(Op* op) {
  if (auto* attention = std::get_if<Attention>(op)) return &attention->layer;
  if (auto* prepare = std::get_if<PrepareQkv>(op)) return &prepare->layer;
  return nullptr;
}

// Moves what `from` has at *index to `to`, once, and makes *index its place there. `places`: by index in `from`, kNone at first.
template <typename T>
void take(const std::vector<T>& from, std::vector<T>* to, std::vector<int32_t>* places, int32_t* index) {
  if (*index == kNone) return;
  int32_t& place = (*places)[*index];
  if (place == kNone) {
    place = static_cast<int32_t>(to->size());
    to->push_back(from[*index]);
  }
  *index = place;
}

}  // namespace

std::vector<Cut> cuts(const Program& program) {
  const auto ops = static_cast<int64_t>(program.ops.size());
  std::vector<int64_t> written_at(program.values.size(), ops), read_at(program.values.size(), -1);
  for (int64_t i = 0; i < ops; ++i) {
    for (const View& view : reads(program.ops[i])) read_at[view.value] = i;
    int64_t& first = written_at[written(program.ops[i]).value];
    first = std::min(first, i);
  }
  std::vector<Cut> found;
  for (int64_t i = 1; i < ops; ++i) {
    ValueId alive = kNone;
    int64_t count = 0;
    for (ValueId value = 0; value < static_cast<ValueId>(program.values.size()); ++value)
      if (written_at[value] < i && read_at[value] >= i) alive = value, ++count;
    if (count == 1) found.push_back({i, alive});
  }
  return found;
}

Program part(const Program& program, int64_t first, int64_t last, std::span<const ValueId> outputs) {
  MAGA_REQUIRE(0 <= first && first < last && last <= static_cast<int64_t>(program.ops.size()), "ops [", first, ", ", last,
               ") of a program of ", program.ops.size());
  Program result = program;
  result.ops.assign(program.ops.begin() + first, program.ops.begin() + last);
  result.outputs.assign(outputs.begin(), outputs.end());
  result.inputs.clear();
  result.weights.clear();
  result.cache_layers.clear();
  std::vector<int32_t> weights(program.weights.size(), kNone), layers(program.cache_layers.size(), kNone);
  std::vector<bool> known(program.values.size(), false);
  for (Op& op : result.ops) {
    for_each_weight(&op, [&](WeightId* id) { take(program.weights, &result.weights, &weights, id); });
    if (int32_t* layer = cache_layer(&op)) take(program.cache_layers, &result.cache_layers, &layers, layer);
    for (const View& view : reads(op))
      if (!known[view.value]) {
        known[view.value] = true;
        result.inputs.push_back(view.value);
      }
    known[written(op).value] = true;
  }
  if (result.logits != kNone && !known[result.logits]) result.logits = kNone;
  result.validate();
  return result;
}

}  // namespace maga
