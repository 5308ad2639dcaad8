// The reference backend: exact dequantisation, double buffers and pages, and a check of every step. It fuses nothing by
// itself, and runs fused ops that a program brings.
#include <algorithm>

#include "backends/reference/ops.h"
#include "core/codes.h"
#include "core/threads.h"

namespace maga {
namespace reference {
namespace {

DoubleWeight dequantize(const WeightSpec& spec, const Dense& dense) {
  MAGA_REQUIRE(dense.values.shape == spec.shape, "weight \"", spec.name, "\" does not have the shape that the program states");
  DoubleWeight out;
  for (int64_t i = 0; i < dense.values.elements(); ++i) out.elements.push_back(float_at(dense.values, i));
  return out;
}

DoubleWeight dequantize(const WeightSpec& spec, const Affine& affine) {
  MAGA_REQUIRE(spec.shape.size() == 2 && affine.codes.shape == spec.shape, "weight \"", spec.name,
               "\" does not have the shape that the program states");
  const int64_t rows = spec.shape[0], cols = spec.shape[1];
  MAGA_REQUIRE(affine.bits >= 1 && affine.bits <= 8, "weight \"", spec.name, "\" has codes of ", affine.bits,
               " bits; valid are 1 to 8");
  MAGA_REQUIRE(affine.zero >= 0 && affine.zero <= 255, "weight \"", spec.name, "\" has the zero point ", affine.zero,
               "; valid are 0 to 255");
  MAGA_REQUIRE(affine.group > 0 && cols % affine.group == 0, "weight \"", spec.name, "\": a group of ", affine.group,
               " does not divide ", cols, " columns");
  const std::vector<int64_t> groups{rows, cols / affine.group};
  MAGA_REQUIRE(affine.scale.shape == groups && (affine.offset.empty() || affine.offset.shape == groups), "weight \"", spec.name,
               "\": scale and offset need the shape (", groups[0], ", ", groups[1], ")");
  DoubleWeight out;
  for (int64_t i = 0; i < rows * cols; ++i) {
    const int code = affine.codes.as<uint8_t>()[i];
    MAGA_REQUIRE(code < 1 << affine.bits, "weight \"", spec.name, "\" has the code ", code, ", above ", affine.bits, " bits");
    const double scale = float_at(affine.scale, i / affine.group);
    const double offset = affine.offset.empty() ? 0 : float_at(affine.offset, i / affine.group);
    out.elements.push_back(scale * (code - affine.zero) + offset);
  }
  return out;
}

DoubleWeight dequantize(const WeightSpec& spec, const Float8& weight) {
  check(spec, weight);
  const int64_t rows = spec.shape[0], cols = spec.shape[1];
  DoubleWeight out;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c) {
      const int64_t block = r / weight.high * weight.scale.shape[1] + c / weight.wide;
      out.elements.push_back(double{float_at(weight.scale, block)} * e4m3_to_float(weight.codes.as<uint8_t>()[r * cols + c]));
    }
  return out;
}

class ReferenceExecutable : public Executable {
 public:
  ReferenceExecutable(const Program& program, std::vector<std::shared_ptr<const DoubleWeight>> weights, const Limits& limits)
      : machine_{.program = program, .weights = std::move(weights), .values = {}, .layers = {}}, limits_(limits) {
    for (const Value& value : program.values) machine_.values.emplace_back(most_rows(value) * value.width);
    page_bytes(program, limits);  // checks the types
    for (const CacheLayer& shape : program.cache_layers) {
      const int64_t entries = limits.pages * limits.page_tokens * shape.kv_heads;
      machine_.layers.push_back({.shape = shape,
                                 .dtype = limits.kv_dtype(static_cast<int64_t>(machine_.layers.size())),
                                 .page_tokens = limits.page_tokens,
                                 .keys = std::vector<double>(entries * shape.head_dim),
                                 .values = std::vector<double>(shape.values_in_keys ? 0 : entries * shape.v_dim)});
    }
  }

  const Program& program() const override { return machine_.program; }
  const Limits& limits() const override { return limits_; }

  void run(const Step& step) override {
    check(step);
    for (const Op& op : machine_.program.ops) reference::run(machine_, op, step);
    if (machine_.program.logits != kNone)
      logits_ = read_value(machine_.program.logits, static_cast<int64_t>(step.logit_rows.size()));
  }

  std::span<const float> logits() override { return logits_; }

  void copy_page(int32_t from, int32_t to) override {
    for (const int32_t page : {from, to}) MAGA_REQUIRE(page >= 0 && page < limits_.pages, "page ", page, " of ", limits_.pages);
    for (LayerPages& layer : machine_.layers) {
      std::copy_n(layer.key(from, 0), layer.page_tokens * layer.shape.kv_heads * layer.shape.head_dim, layer.key(to, 0));
      std::copy_n(layer.value(from, 0), layer.page_tokens * layer.shape.kv_heads * layer.shape.v_dim, layer.value(to, 0));
    }
  }

  void fill(int32_t index, int64_t tokens, const float* keys, const float* values) override {
    LayerPages& layer = machine_.layers[index];
    const int64_t k_width = layer.shape.kv_heads * layer.shape.head_dim, v_width = layer.shape.kv_heads * layer.shape.v_dim;
    const std::vector<double> all_keys(keys, keys + tokens * k_width), all_values(values, values + tokens * v_width);
    for (int64_t t = 0; t < tokens; ++t)
      layer.write(static_cast<int32_t>(t / layer.page_tokens), t % layer.page_tokens, &all_keys[t * k_width],
                  &all_values[t * v_width]);
  }

  void write_value(ValueId value, std::span<const float> rows) override {
    const int64_t width = checked(value, 0).width, size = static_cast<int64_t>(rows.size());
    MAGA_REQUIRE(size % width == 0, size, " elements are not rows of ", width);
    checked(value, size / width);
    std::copy(rows.begin(), rows.end(), machine_.values[value].begin());
  }

  std::vector<float> read_value(ValueId value, int64_t rows) override {
    const int64_t width = checked(value, rows).width;
    const std::vector<double>& from = machine_.values[value];
    return {from.begin(), from.begin() + rows * width};
  }

  int64_t buffer_bytes() const override {
    int64_t elements = 0;
    for (const auto& value : machine_.values) elements += static_cast<int64_t>(value.size());
    return elements * static_cast<int64_t>(sizeof(double));
  }

 private:
  int64_t most_rows(const Value& value) const { return value.rows == Rows::tokens ? limits_.tokens : limits_.logit_rows; }

  const Value& checked(ValueId value, int64_t rows) const {
    const auto& values = machine_.program.values;
    MAGA_REQUIRE(value >= 0 && value < static_cast<int64_t>(values.size()), "value ", value, " of ", values.size());
    MAGA_REQUIRE(rows >= 0 && rows <= most_rows(values[value]), rows, " rows of \"", values[value].name, "\", which holds ",
                 most_rows(values[value]));
    return values[value];
  }

  void check(const Step& step) const {
    const int64_t tokens = step.tokens(), sequences = step.sequences();
    MAGA_REQUIRE(tokens <= limits_.tokens && sequences <= limits_.sequences &&
                     static_cast<int64_t>(step.logit_rows.size()) <= limits_.logit_rows,
                 "a step of ", tokens, " tokens, ", sequences, " sequences and ", step.logit_rows.size(),
                 " logit rows is above the limits");
    MAGA_REQUIRE(static_cast<int64_t>(step.positions.size()) == tokens, step.positions.size(), " positions for ", tokens,
                 " tokens");
    for (const auto& start : {step.sequence_start, step.page_start})
      MAGA_REQUIRE(
          static_cast<int64_t>(start.size()) == sequences + 1 && start[0] == 0 && std::is_sorted(start.begin(), start.end()),
          "sequence_start and page_start need ", sequences + 1, " ascending entries from 0");
    MAGA_REQUIRE(step.sequence_start[sequences] == tokens, "sequence_start ends at ", step.sequence_start[sequences], " of ",
                 tokens);
    MAGA_REQUIRE(step.page_start[sequences] == static_cast<int64_t>(step.pages.size()), "page_start ends at ",
                 step.page_start[sequences], " of ", step.pages.size());
    MAGA_REQUIRE(step.prompt_length.empty() || static_cast<int64_t>(step.prompt_length.size()) == sequences,
                 step.prompt_length.size(), " prompt lengths for ", sequences, " sequences");
    for (int64_t s = 0; s < sequences; ++s) {
      const int64_t brought = step.sequence_start[s + 1] - step.sequence_start[s];
      const int64_t held = (step.page_start[s + 1] - step.page_start[s]) * limits_.page_tokens;
      MAGA_REQUIRE(brought <= step.kv_length[s], "sequence ", s, " brings ", brought, " tokens to a K/V length of ",
                   step.kv_length[s]);
      MAGA_REQUIRE(machine_.layers.empty() || step.kv_length[s] <= held, "sequence ", s, " has a K/V length of ", step.kv_length[s],
                   " in pages for ", held);
    }
    for (const int32_t page : step.pages) MAGA_REQUIRE(page >= 0 && page < limits_.pages, "page ", page, " of ", limits_.pages);
    for (const int32_t row : step.logit_rows) MAGA_REQUIRE(row >= 0 && row < tokens, "logit row ", row, " of ", tokens, " tokens");
    for (const RopeTable& table : machine_.program.rope_tables)
      MAGA_REQUIRE(!table.by_block || static_cast<int64_t>(step.block_positions.size()) == tokens, step.block_positions.size(),
                   " block positions for ", tokens, " tokens");
    MAGA_REQUIRE(step.context.empty() || static_cast<int64_t>(step.context.size()) == sequences, step.context.size(),
                 " contexts for ", sequences, " sequences");
    for (int64_t s = 0; !step.context.empty() && s < sequences; ++s)
      MAGA_REQUIRE(step.context[s] >= 0 && step.context[s] <= step.kv_length[s], "a context of ", step.context[s],
                   " tokens at a K/V length of ", step.kv_length[s]);
    if (const int64_t rows = machine_.program.table_positions())
      for (const int32_t position : step.positions)
        MAGA_REQUIRE(position >= 0 && position < rows, "position ", position, " of ", rows);
    for (const Op& op : machine_.program.ops)
      if (std::holds_alternative<Embed>(op))
        for (const int32_t id : step.ids)
          MAGA_REQUIRE(id >= 0 && id < machine_.program.vocab + machine_.program.virtual_tokens, "token id ", id,
                       " of a vocabulary of ", machine_.program.vocab, " and ", machine_.program.virtual_tokens, " virtual tokens");
  }

  Machine machine_;
  Limits limits_;
  std::vector<float> logits_;
};

DoubleWeight unpacked(const WeightSpec& spec, const Canonical& weight) {
  MAGA_REQUIRE(spec.shape.size() == 1 || spec.shape.size() == 2, "weight \"", spec.name, "\" has ", spec.shape.size(),
               " dimensions; vectors and matrices can be taken");
  auto packed = std::visit([&](const auto& form) { return dequantize(spec, form); }, weight);
  packed.rows = spec.shape.size() == 2 ? spec.shape[0] : 1;
  packed.cols = spec.shape.back();
  return packed;
}

class ReferenceStack : public WeightStack {
 public:
  using WeightStack::WeightStack;

 protected:
  void append(const WeightSpec& matrix_spec, const Canonical& matrix) override {
    const DoubleWeight one = unpacked(matrix_spec, matrix);
    all_.elements.insert(all_.elements.end(), one.elements.begin(), one.elements.end());
    all_.rows += one.rows;
    all_.cols = one.cols;
  }
  std::shared_ptr<const Weight> packed() override { return std::make_shared<DoubleWeight>(std::move(all_)); }

 private:
  DoubleWeight all_;
};

class ReferenceBackend : public Backend {
 public:
  std::string describe() const override { return "reference, double precision"; }
  FusedOps fused_ops() const override { return {}; }
  ThreadPool& threads() override { return threads_; }

  std::shared_ptr<const Weight> pack(const WeightSpec& spec, const Canonical& weight) override {
    return std::make_shared<DoubleWeight>(unpacked(spec, weight));
  }

  std::unique_ptr<WeightStack> stack(const WeightSpec& spec) override { return std::make_unique<ReferenceStack>(spec); }

  std::unique_ptr<Executable> load(const Program& program, std::vector<std::shared_ptr<const Weight>> weights,
                                   const Limits& limits) override {
    program.validate();
    MAGA_REQUIRE(weights.size() == program.weights.size(), weights.size(), " weights for a program of ", program.weights.size());
    std::vector<std::shared_ptr<const DoubleWeight>> own;
    for (size_t i = 0; i < weights.size(); ++i) {
      own.push_back(std::dynamic_pointer_cast<const DoubleWeight>(weights[i]));
      MAGA_REQUIRE(own[i], "weight \"", program.weights[i].name, "\" was packed by another backend");
      const auto& shape = program.weights[i].shape;
      int64_t rows = 1;
      for (size_t d = 0; d + 1 < shape.size(); ++d) rows *= shape[d];
      MAGA_REQUIRE(own[i]->cols == shape.back() && own[i]->rows == rows, "weight \"", program.weights[i].name, "\" is ",
                   own[i]->rows, " by ", own[i]->cols, ", not what the program states");
    }
    return std::make_unique<ReferenceExecutable>(program, std::move(own), limits);
  }

 private:
  ThreadPool threads_{1};
};

}  // namespace
}  // namespace reference

std::shared_ptr<Backend> make_reference_backend() { return std::make_shared<reference::ReferenceBackend>(); }

}  // namespace maga
