// Python's view of cpp/program: a Program that is built op by op, and the passes over it.
#include <pybind11/stl.h>

#include <optional>
#include <span>

#include "backends/backend.h"
#include "bindings/bind.h"
#include "program/cost.h"
#include "program/fuse.h"
#include "program/part.h"
#include "program/program.h"

namespace py = pybind11;

namespace maga {
namespace {

template <typename Enum>
using Names = std::span<const std::pair<std::string_view, Enum>>;

template <typename Enum>
Enum parse(std::string_view what, const std::string& text, Names<Enum> names) {
  std::string valid;
  for (const auto& [name, value] : names) {
    if (name == text) return value;
    valid += (valid.empty() ? "" : ", ") + std::string(name);
  }
  throw Error(ErrorKind::invalid, concat("unknown ", what, " '", text, "': valid are ", valid));
}

constexpr std::pair<std::string_view, NormKind> kNormKinds[] = {{"rms", NormKind::rms}, {"layer", NormKind::layer}};
constexpr std::pair<std::string_view, PoolKind> kPoolKinds[] = {
    {"first", PoolKind::first}, {"last", PoolKind::last}, {"mean", PoolKind::mean}};
constexpr std::pair<std::string_view, ActivationKind> kActivations[] = {{"silu", ActivationKind::silu},
                                                                        {"gelu", ActivationKind::gelu},
                                                                        {"gelu_tanh", ActivationKind::gelu_tanh},
                                                                        {"relu", ActivationKind::relu},
                                                                        {"relu2", ActivationKind::relu2}};
constexpr std::pair<std::string_view, BoundKind> kBounds[] = {{"clamp", BoundKind::clamp}, {"tanh", BoundKind::tanh}};
constexpr std::pair<std::string_view, ScoreKind> kScores[] = {{"softmax", ScoreKind::softmax}, {"sigmoid", ScoreKind::sigmoid}};
constexpr std::pair<std::string_view, Rows> kRows[] = {{"tokens", Rows::tokens}, {"logits", Rows::logits}};

template <typename Enum>
std::string name_in(Enum value, Names<Enum> names) {
  for (const auto& [name, candidate] : names)
    if (candidate == value) return std::string(name);
  return "?";
}

View add_value(Program& p, const std::string& name, int64_t width, Rows rows) {
  MAGA_REQUIRE(width > 0, "value '", name, "' has width ", width);
  p.values.push_back({name, width, rows});
  return {static_cast<ValueId>(p.values.size() - 1), 0, width};
}

py::object view(const View& v) { return v ? py::object(py::make_tuple(v.value, v.offset, v.width)) : py::none(); }

// Every field of an op under its C++ name.
struct Describe {
  py::dict operator()(const Embed& o) const {
    return py::dict(py::arg("out") = view(o.out), py::arg("table") = o.table, py::arg("scale") = o.scale,
                    py::arg("virtual_table") = o.virtual_table);
  }
  py::dict operator()(const AddPositions& o) const {
    return py::dict(py::arg("out") = view(o.out), py::arg("in") = view(o.in), py::arg("table") = o.table,
                    py::arg("offset") = o.offset, py::arg("divisor") = o.divisor);
  }
  py::dict operator()(const LogScale& o) const { return py::dict(py::arg("x") = view(o.x), py::arg("from") = o.from); }
  py::dict operator()(const Bound& o) const {
    return py::dict(py::arg("out") = view(o.out), py::arg("in") = view(o.in), py::arg("kind") = name_in<BoundKind>(o.kind, kBounds),
                    py::arg("limit") = o.limit);
  }
  py::dict operator()(const Norm& o) const {
    return py::dict(py::arg("out") = view(o.out), py::arg("in") = view(o.in), py::arg("weight") = o.weight,
                    py::arg("bias") = o.bias, py::arg("kind") = name_in<NormKind>(o.kind, kNormKinds), py::arg("eps") = o.eps,
                    py::arg("weight_offset") = o.weight_offset, py::arg("group") = o.group);
  }
  py::dict operator()(const Linear& o) const {
    return py::dict(py::arg("out") = view(o.out), py::arg("in") = view(o.in), py::arg("weight") = o.weight,
                    py::arg("bias") = o.bias, py::arg("residual") = view(o.residual));
  }
  py::dict operator()(const HeadLinear& o) const {
    return py::dict(py::arg("out") = view(o.out), py::arg("in") = view(o.in), py::arg("weight") = o.weight,
                    py::arg("heads") = o.heads);
  }
  py::dict operator()(const Rope& o) const {
    return py::dict(py::arg("x") = view(o.x), py::arg("head_dim") = o.head_dim, py::arg("table") = o.table,
                    py::arg("offset") = o.offset);
  }
  py::dict operator()(const Attention& o) const {
    return py::dict(py::arg("out") = view(o.out), py::arg("q") = view(o.q), py::arg("k") = view(o.k), py::arg("v") = view(o.v),
                    py::arg("layer") = o.layer, py::arg("heads") = o.heads, py::arg("kv_heads") = o.kv_heads,
                    py::arg("head_dim") = o.head_dim, py::arg("scale") = o.scale, py::arg("window") = o.window,
                    py::arg("soft_cap") = o.soft_cap, py::arg("alibi") = o.alibi, py::arg("sinks") = o.sinks);
  }
  py::dict operator()(const Activation& o) const {
    return py::dict(py::arg("out") = view(o.out), py::arg("gate") = view(o.gate), py::arg("up") = view(o.up),
                    py::arg("kind") = name_in<ActivationKind>(o.kind, kActivations));
  }
  py::dict operator()(const Add& o) const {
    return py::dict(py::arg("out") = view(o.out), py::arg("a") = view(o.a), py::arg("b") = view(o.b));
  }
  py::dict operator()(const Pool& o) const {
    return py::dict(py::arg("out") = view(o.out), py::arg("in") = view(o.in),
                    py::arg("kind") = name_in<PoolKind>(o.kind, kPoolKinds));
  }
  py::dict operator()(const Select& o) const { return py::dict(py::arg("out") = view(o.out), py::arg("in") = view(o.in)); }
  py::dict operator()(const Moe& o) const {
    const Routing& r = o.routing;
    return py::dict(py::arg("out") = view(o.out), py::arg("in") = view(o.in), py::arg("logits") = view(o.logits),
                    py::arg("residual") = view(o.residual), py::arg("gate_up") = o.gate_up, py::arg("down") = o.down,
                    py::arg("gate_up_bias") = o.gate_up_bias, py::arg("down_bias") = o.down_bias, py::arg("width") = o.width,
                    py::arg("experts") = r.experts, py::arg("top_k") = r.top_k,
                    py::arg("score") = name_in<ScoreKind>(r.score, kScores), py::arg("correction") = r.correction,
                    py::arg("groups") = r.groups, py::arg("top_groups") = r.top_groups, py::arg("group_best") = r.group_best,
                    py::arg("renormalise") = r.renormalise, py::arg("scale") = r.scale,
                    py::arg("kind") = name_in<ActivationKind>(o.gating.kind, kActivations), py::arg("alpha") = o.gating.alpha,
                    py::arg("limit") = o.gating.limit, py::arg("up_offset") = o.gating.up_offset);
  }
  py::dict operator()(const GatedLinear& o) const {
    return py::dict(py::arg("out") = view(o.out), py::arg("in") = view(o.in), py::arg("weight") = o.weight,
                    py::arg("bias") = o.bias, py::arg("kind") = name_in<ActivationKind>(o.kind, kActivations));
  }
  py::dict operator()(const PrepareQkv& o) const {
    return py::dict(py::arg("q") = view(o.q), py::arg("k") = view(o.k), py::arg("v") = view(o.v), py::arg("q_norm") = o.q_norm,
                    py::arg("k_norm") = o.k_norm, py::arg("eps") = o.eps, py::arg("weight_offset") = o.weight_offset,
                    py::arg("rope_table") = o.rope_table, py::arg("layer") = o.layer, py::arg("heads") = o.heads,
                    py::arg("kv_heads") = o.kv_heads, py::arg("head_dim") = o.head_dim);
  }
};

void bind_ops(py::class_<Program>& program) {
  const auto none = py::none();
  program
      .def(
          "embed", [](Program& p, View out, WeightId table, float scale) { p.ops.push_back(Embed{out, table, scale}); },
          py::arg("out"), py::arg("table"), py::arg("scale") = 1.0f)
      .def(
          "add_positions",
          [](Program& p, View out, View in, WeightId table, int64_t offset, int64_t divisor) {
            p.ops.push_back(AddPositions{out, in, table, offset, divisor});
          },
          py::arg("out"), py::arg("in_"), py::kw_only(), py::arg("table"), py::arg("offset") = 0, py::arg("divisor") = 1)
      .def(
          "log_scale", [](Program& p, View x, int64_t from) { p.ops.push_back(LogScale{x, from}); }, py::arg("x"), py::kw_only(),
          py::arg("from_"))
      .def(
          "bound",
          [](Program& p, View out, View in, const std::string& kind, float limit) {
            p.ops.push_back(Bound{out, in, parse<BoundKind>("bound", kind, kBounds), limit});
          },
          py::arg("out"), py::arg("in_"), py::kw_only(), py::arg("kind"), py::arg("limit"))
      .def(
          "norm",
          [](Program& p, View out, View in, WeightId weight, WeightId bias, const std::string& kind, float eps, int64_t group,
             float weight_offset) {
            p.ops.push_back(Norm{.out = out,
                                 .in = in,
                                 .weight = weight,
                                 .bias = bias,
                                 .kind = parse<NormKind>("norm", kind, kNormKinds),
                                 .eps = eps,
                                 .weight_offset = weight_offset,
                                 .group = group});
          },
          py::arg("out"), py::arg("in_"), py::kw_only(), py::arg("weight"), py::arg("bias") = kNone, py::arg("kind"),
          py::arg("eps"), py::arg("group"), py::arg("weight_offset") = 0.0f)
      .def(
          "linear",
          [](Program& p, View out, View in, WeightId weight, WeightId bias, std::optional<View> residual) {
            p.ops.push_back(Linear{.out = out, .in = in, .weight = weight, .bias = bias, .residual = residual.value_or(View{})});
          },
          py::arg("out"), py::arg("in_"), py::kw_only(), py::arg("weight"), py::arg("bias") = kNone, py::arg("residual") = none)
      .def(
          "rope",
          [](Program& p, View x, int64_t head_dim, int32_t table, int64_t offset) {
            p.ops.push_back(Rope{x, head_dim, table, offset});
          },
          py::arg("x"), py::kw_only(), py::arg("head_dim"), py::arg("table"), py::arg("offset") = 0)
      .def(
          "attention",
          [](Program& p, View out, View q, std::optional<View> k, std::optional<View> v, int32_t layer, int64_t heads,
             int64_t kv_heads, int64_t head_dim, float scale, int64_t window, float soft_cap, int32_t alibi, WeightId sinks) {
            p.ops.push_back(Attention{.out = out,
                                      .q = q,
                                      .k = k.value_or(View{}),
                                      .v = v.value_or(View{}),
                                      .layer = layer,
                                      .heads = heads,
                                      .kv_heads = kv_heads,
                                      .head_dim = head_dim,
                                      .scale = scale,
                                      .window = window,
                                      .soft_cap = soft_cap,
                                      .alibi = alibi,
                                      .sinks = sinks});
          },
          py::arg("out"), py::arg("q"), py::arg("k"), py::arg("v"), py::kw_only(), py::arg("layer"), py::arg("heads"),
          py::arg("kv_heads"), py::arg("head_dim"), py::arg("scale"), py::arg("window") = 0, py::arg("soft_cap") = 0.0f,
          py::arg("alibi") = kNone, py::arg("sinks") = kNone)
      .def(
          "activation",
          [](Program& p, View out, View gate, std::optional<View> up, const std::string& kind) {
            p.ops.push_back(Activation{out, gate, up.value_or(View{}), parse<ActivationKind>("activation", kind, kActivations)});
          },
          py::arg("out"), py::arg("gate"), py::arg("up"), py::kw_only(), py::arg("kind"))
      .def(
          "add", [](Program& p, View out, View a, View b) { p.ops.push_back(Add{out, a, b}); }, py::arg("out"), py::arg("a"),
          py::arg("b"))
      .def(
          "pool",
          [](Program& p, View out, View in, const std::string& kind) {
            p.ops.push_back(Pool{out, in, parse<PoolKind>("pool", kind, kPoolKinds)});
          },
          py::arg("out"), py::arg("in_"), py::kw_only(), py::arg("kind"))
      .def(
          "select", [](Program& p, View out, View in) { p.ops.push_back(Select{out, in}); }, py::arg("out"), py::arg("in_"))
      .def(
          "moe",
          [](Program& p, View out, View in, View logits, std::optional<View> residual, WeightId gate_up, WeightId down,
             WeightId gate_up_bias, WeightId down_bias, int64_t width, int64_t experts, int64_t top_k, const std::string& score,
             int32_t correction, int64_t groups, int64_t top_groups, int64_t group_best, bool renormalise, float scale,
             const std::string& kind, float alpha, float limit, float up_offset) {
            p.ops.push_back(Moe{.out = out,
                                .in = in,
                                .logits = logits,
                                .residual = residual.value_or(View{}),
                                .gate_up = gate_up,
                                .down = down,
                                .gate_up_bias = gate_up_bias,
                                .down_bias = down_bias,
                                .width = width,
                                .routing = {.experts = experts,
                                            .top_k = top_k,
                                            .score = parse<ScoreKind>("score", score, kScores),
                                            .correction = correction,
                                            .groups = groups,
                                            .top_groups = top_groups,
                                            .group_best = group_best,
                                            .renormalise = renormalise,
                                            .scale = scale},
                                .gating = {.kind = parse<ActivationKind>("activation", kind, kActivations),
                                           .alpha = alpha,
                                           .limit = limit,
                                           .up_offset = up_offset}});
          },
          py::arg("out"), py::arg("in_"), py::arg("logits"), py::kw_only(), py::arg("residual") = none, py::arg("gate_up"),
          py::arg("down"), py::arg("gate_up_bias") = kNone, py::arg("down_bias") = kNone, py::arg("width"), py::arg("experts"),
          py::arg("top_k"), py::arg("score") = "softmax", py::arg("correction") = kNone, py::arg("groups") = 1,
          py::arg("top_groups") = 1, py::arg("group_best") = 1, py::arg("renormalise") = false, py::arg("scale") = 1.0f,
          py::arg("kind"), py::arg("alpha") = 1.0f, py::arg("limit") = 0.0f, py::arg("up_offset") = 0.0f)
      .def(
          "head_linear",
          [](Program& p, View out, View in, WeightId weight, int64_t heads) {
            p.ops.push_back(HeadLinear{out, in, weight, heads});
          },
          py::arg("out"), py::arg("in_"), py::kw_only(), py::arg("weight"), py::arg("heads"))
      .def(
          "gated_linear",
          [](Program& p, View out, View in, WeightId weight, WeightId bias, const std::string& kind) {
            p.ops.push_back(GatedLinear{out, in, weight, bias, parse<ActivationKind>("activation", kind, kActivations)});
          },
          py::arg("out"), py::arg("in_"), py::kw_only(), py::arg("weight"), py::arg("bias") = kNone, py::arg("kind"))
      .def(
          "prepare_qkv",
          [](Program& p, View q, View k, View v, WeightId q_norm, WeightId k_norm, float eps, float weight_offset,
             int32_t rope_table, int32_t layer, int64_t heads, int64_t kv_heads, int64_t head_dim) {
            p.ops.push_back(PrepareQkv{.q = q,
                                       .k = k,
                                       .v = v,
                                       .q_norm = q_norm,
                                       .k_norm = k_norm,
                                       .eps = eps,
                                       .weight_offset = weight_offset,
                                       .rope_table = rope_table,
                                       .layer = layer,
                                       .heads = heads,
                                       .kv_heads = kv_heads,
                                       .head_dim = head_dim});
          },
          py::arg("q"), py::arg("k"), py::arg("v"), py::kw_only(), py::arg("q_norm") = kNone, py::arg("k_norm") = kNone,
          py::arg("eps") = 0.0f, py::arg("weight_offset") = 0.0f, py::arg("rope_table") = kNone, py::arg("layer"), py::arg("heads"),
          py::arg("kv_heads"), py::arg("head_dim"));
}

}  // namespace

DType parse_dtype(const std::string& text) {
  static constexpr std::pair<std::string_view, DType> kFloatTypes[] = {
      {"fp32", DType::f32}, {"fp16", DType::f16}, {"bf16", DType::bf16}};
  return parse<DType>("dtype", text, kFloatTypes);
}

std::vector<DType> parse_kv_dtypes(const KvDTypes& text) {
  static constexpr std::pair<std::string_view, DType> kTypes[] = {{"fp32", DType::f32},         {"fp16", DType::f16},
                                                                  {"bf16", DType::bf16},        {"int8", DType::i8},
                                                                  {"fp8_e4m3", DType::f8_e4m3}, {"fp8_e5m2", DType::f8_e5m2}};
  std::vector<DType> types;
  const auto add = [&](const std::string& one) { types.push_back(parse<DType>("K/V dtype", one, kTypes)); };
  if (const auto* one = std::get_if<std::string>(&text))
    add(*one);
  else
    for (const std::string& each : std::get<std::vector<std::string>>(text)) add(each);
  return types;
}

void bind_program(py::module_& m) {
  py::class_<View>(m, "View")
      .def(py::init([](ValueId value, int64_t offset, int64_t width) { return View{value, offset, width}; }), py::arg("value"),
           py::arg("offset"), py::arg("width"))
      .def_readonly("value", &View::value)
      .def_readonly("offset", &View::offset)
      .def_readonly("width", &View::width)
      .def("__repr__", [](const View& v) { return concat("View(", v.value, ", ", v.offset, ", ", v.width, ")"); });

  py::class_<Program> program(m, "Program");
  program.def(py::init<>())
      .def_readwrite("family", &Program::family)
      .def_readwrite("vocab", &Program::vocab)
      .def_readonly("virtual_tokens", &Program::virtual_tokens)
      .def("add_virtual_tokens", &Program::add_virtual_tokens, py::arg("table"))
      .def_readwrite("embeds", &Program::embeds)
      .def_readwrite("row_per_token", &Program::row_per_token)
      .def_property_readonly("whole_prompts", &Program::whole_prompts)
      .def_property_readonly("logits_width", &Program::logits_width)
      .def_readwrite("max_positions", &Program::max_positions)
      .def_readwrite("logits", &Program::logits)
      .def(
          "set_context",
          [](Program& p, int32_t end, std::vector<int32_t> held, bool whole) { p.context = {whole, end, std::move(held)}; },
          py::arg("end") = kNone, py::arg("held") = std::vector<int32_t>{}, py::arg("whole") = false)
      .def_property_readonly("context",
                             [](const Program& p) { return py::make_tuple(p.context.end, p.context.held, p.context.whole); })
      .def(
          "value",
          [](Program& p, const std::string& name, int64_t width, const std::string& rows) {
            return add_value(p, name, width, parse<Rows>("rows", rows, kRows));
          },
          py::arg("name"), py::arg("width"), py::arg("rows") = "tokens")
      .def(
          "input",
          [](Program& p, const std::string& name, int64_t width) {
            const View v = add_value(p, name, width, Rows::tokens);
            p.inputs.push_back(v.value);
            return v;
          },
          py::arg("name"), py::arg("width"))
      .def(
          "output", [](Program& p, View v) { p.outputs.push_back(v.value); }, py::arg("view"))
      .def(
          "weight",
          [](Program& p, std::string name, std::vector<std::string> sources, std::vector<int64_t> shape) {
            p.weights.push_back({std::move(name), std::move(sources), std::move(shape)});
            return static_cast<WeightId>(p.weights.size() - 1);
          },
          py::arg("name"), py::arg("sources"), py::arg("shape"))
      .def(
          "rope_table",
          [](Program& p, int64_t rotary_dim, std::vector<float> inv_freq, bool interleaved, float multiplier, float theta,
             bool by_block, float dynamic_factor, bool stepped, std::vector<float> long_inv_freq, int64_t max_positions) {
            p.rope_tables.push_back({.rotary_dim = rotary_dim,
                                     .interleaved = interleaved,
                                     .inv_freq = std::move(inv_freq),
                                     .multiplier = multiplier,
                                     .by_block = by_block,
                                     .theta = theta,
                                     .dynamic_factor = dynamic_factor,
                                     .stepped = stepped,
                                     .long_inv_freq = std::move(long_inv_freq),
                                     .max_positions = max_positions});
            return static_cast<int32_t>(p.rope_tables.size() - 1);
          },
          py::arg("rotary_dim"), py::arg("inv_freq"), py::kw_only(), py::arg("interleaved") = false, py::arg("multiplier") = 1.0f,
          py::arg("theta") = 0.0f, py::arg("by_block") = false, py::arg("dynamic_factor") = 0.0f, py::arg("stepped") = false,
          py::arg("long_inv_freq") = std::vector<float>(), py::arg("max_positions") = 0)
      .def(
          "alibi_slopes",
          [](Program& p, std::vector<float> slopes) {
            p.alibi_slopes.push_back(std::move(slopes));
            return static_cast<int32_t>(p.alibi_slopes.size() - 1);
          },
          py::arg("slopes"))
      .def(
          "corrections",
          [](Program& p, std::vector<float> corrections) {
            p.corrections.push_back(std::move(corrections));
            return static_cast<int32_t>(p.corrections.size() - 1);
          },
          py::arg("corrections"))
      .def(
          "cache_layer",
          [](Program& p, int64_t kv_heads, int64_t head_dim, int64_t v_dim, bool values_in_keys) {
            p.cache_layers.push_back({kv_heads, head_dim, v_dim, values_in_keys});
            return static_cast<int32_t>(p.cache_layers.size() - 1);
          },
          py::arg("kv_heads"), py::arg("head_dim"), py::arg("v_dim"), py::arg("values_in_keys") = false)
      .def_readonly("inputs", &Program::inputs)
      .def(
          "state_scales",
          [](Program& p, int32_t layer, float k, float v) {
            MAGA_REQUIRE(layer >= 0 && layer < static_cast<int32_t>(p.cache_layers.size()), "cache layer ", layer, " of ",
                         p.cache_layers.size());
            p.cache_layers[layer].k_scale = bf16_to_float(float_to_bf16(k));  // as pages hold them
            p.cache_layers[layer].v_scale = bf16_to_float(float_to_bf16(v));
          },
          py::arg("layer"), py::arg("k"), py::arg("v"))
      .def("validate", &Program::validate)
      .def_property_readonly("weights",
                             [](const Program& p) {
                               py::list out;
                               for (const WeightSpec& w : p.weights) out.append(py::make_tuple(w.name, w.sources, w.shape));
                               return out;
                             })
      .def_property_readonly("values",
                             [](const Program& p) {
                               py::list out;
                               for (const Value& v : p.values)
                                 out.append(py::make_tuple(v.name, v.width, name_in<Rows>(v.rows, kRows)));
                               return out;
                             })
      .def_property_readonly("cache_layers",
                             [](const Program& p) {
                               py::list out;
                               for (const CacheLayer& l : p.cache_layers)
                                 out.append(py::make_tuple(l.kv_heads, l.head_dim, l.v_dim));
                               return out;
                             })
      .def_property_readonly("ops",
                             [](const Program& p) {
                               py::list out;
                               for (const Op& op : p.ops) {
                                 py::dict entry(py::arg("op") = std::string(name_of(op)));
                                 entry.attr("update")(std::visit(Describe{}, op));
                                 out.append(entry);
                               }
                               return out;
                             })
      .def(
          "page_bytes",
          [](const Program& p, int64_t page_tokens, const KvDTypes& kv_dtype) {
            return page_bytes(p, {.page_tokens = page_tokens, .kv_dtypes = parse_kv_dtypes(kv_dtype)});
          },
          py::arg("page_tokens"), py::arg("kv_dtype"));
  bind_ops(program);

  m.def(
      "fuse",
      [](const Program& p, bool linear_residual, bool gated_linear, bool prepare_qkv) {
        return fuse(p, {.linear_residual = linear_residual, .gated_linear = gated_linear, .prepare_qkv = prepare_qkv});
      },
      py::arg("program"), py::kw_only(), py::arg("linear_residual"), py::arg("gated_linear"), py::arg("prepare_qkv"));
  m.def(
      "cuts",
      [](const Program& p) {
        std::vector<std::pair<int64_t, ValueId>> found;
        for (const Cut& cut : cuts(p)) found.emplace_back(cut.op, cut.value);
        return found;
      },
      py::arg("program"));
  m.def(
      "part",
      [](const Program& p, int64_t first, int64_t last, const std::vector<ValueId>& outputs) {
        return part(p, first, last, outputs);
      },
      py::arg("program"), py::arg("first"), py::arg("last"), py::kw_only(), py::arg("outputs"));
  m.def(
      "cost",
      [](const Program& p, int64_t sequences, int64_t tokens_per_sequence, int64_t context, int64_t logit_rows,
         const KvDTypes& kv_dtype, const std::vector<double>& weight_bytes) {
        py::list out;
        const std::vector<DType> kv_dtypes = parse_kv_dtypes(kv_dtype);
        MAGA_REQUIRE(sequences >= 0, sequences, " sequences");
        const std::vector<SequenceWork> all(sequences, {tokens_per_sequence, context});
        for (const OpCost& c : cost(p, {all, logit_rows, kv_dtypes}, weight_bytes))
          out.append(py::make_tuple(c.flops, c.weight_bytes, c.kv_bytes));
        return out;
      },
      py::arg("program"), py::kw_only(), py::arg("sequences"), py::arg("tokens_per_sequence"), py::arg("context"),
      py::arg("logit_rows"), py::arg("kv_dtype"), py::arg("weight_bytes"));
}

}  // namespace maga
