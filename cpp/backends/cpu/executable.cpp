#include "backends/cpu/executable.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "backends/cpu/linear.h"
#include "core/overloaded.h"

namespace maga::cpu {
namespace {

constexpr int64_t kAlignment = 64;
// Floats below which waking the other threads costs more than it brings.
constexpr int64_t kWorthThreads = 8 * 1024;
// Rows of a share, at most: tokens of a prompt that share cache lines of a page should fall to one thread.
constexpr int64_t kShareRows = 16;
// A float that is rotated and written into a page, in floats that are only read and written: keys lie transposed in their pages,
// so each touches a cache line of its own.
constexpr int64_t kPrepareCost = 4;
// For the states of row blocks that are split over threads. Touched only as far as long contexts need it.
constexpr int64_t kPartialFloats = 8 * 1024 * 1024;
// Tokens whose keys are prepared at once, before they go to the pages.
constexpr int64_t kPrepareTokens = 16;

}  // namespace

CpuExecutable::CpuExecutable(std::shared_ptr<Device> device, Program program, std::vector<std::shared_ptr<const Weight>> weights,
                             const Limits& limits)
    : device_(std::move(device)),
      kernels_(row_kernels(device_->isa)),
      program_(std::move(program)),
      weights_(std::move(weights)),
      limits_(limits),
      pages_(program_, limits),
      batch_(limits, pages_.page_bytes(), program_),
      experts_(program_, limits) {
  check_weights();
  place_values();
  for (const RopeTable& table : program_.rope_tables) turns_.emplace_back(table, limits.tokens);
  plan_attention();
  allocate_scratch();
  op_seconds_.resize(program_.ops.size());
}

void CpuExecutable::check_weights() const {
  MAGA_CHECK(weights_.size() == program_.weights.size(), weights_.size(), " weights for a program of ", program_.weights.size());
  for (size_t i = 0; i < weights_.size(); ++i) {
    const WeightSpec& spec = program_.weights[i];
    if (const auto* packed = dynamic_cast<const PackedWeight*>(weights_[i].get()))
      MAGA_CHECK(spec.shape == std::vector<int64_t>({packed->rows(), packed->cols()}), spec.name, " is packed as ", packed->rows(),
                 " x ", packed->cols());
    else if (const auto* vector = dynamic_cast<const VectorWeight*>(weights_[i].get()))
      MAGA_CHECK(spec.shape == std::vector<int64_t>({vector->size()}), spec.name, " is packed as ", vector->size(), " elements");
    else if (const auto* stack = dynamic_cast<const StackedWeight*>(weights_[i].get()))
      MAGA_CHECK(spec.shape == stack->shape(), spec.name, " is packed in another shape");
    else
      MAGA_CHECK(false, spec.name, " was not packed by the CPU backend");
  }
}

void CpuExecutable::place_values() {
  std::vector<int64_t> bytes;
  for (size_t v = 0; v < program_.values.size(); ++v)
    bytes.push_back(capacity(static_cast<ValueId>(v)) * program_.values[v].width * static_cast<int64_t>(sizeof(float)));
  const BufferPlan plan = plan_buffers(program_, bytes, kAlignment);
  arena_ = std::make_unique<Mapping>(plan.bytes, "activations");
  for (const int64_t offset : plan.offset) values_.push_back(reinterpret_cast<float*>(arena_->data() + offset));
}

void CpuExecutable::plan_attention() {
  for (const Op& op : program_.ops)
    if (const auto* attention = std::get_if<Attention>(&op)) {
      const AttentionForm form = form_of(*attention);
      thread_floats_ = std::max(thread_floats_, attention_scratch_floats(form.group, form.head_dim, form.v_dim));
      if (std::none_of(plans_.begin(), plans_.end(), [&](const AttentionPlan& plan) { return plan.form() == form; })) {
        if (!partials_) partials_ = std::make_unique<Mapping>(kPartialFloats * sizeof(float), "attention states");
        plans_.emplace_back(form, reinterpret_cast<float*>(partials_->data()), kPartialFloats);
      }
    } else if (const auto* prepare = std::get_if<PrepareQkv>(&op)) {
      thread_floats_ = std::max(thread_floats_, kPrepareTokens * prepare->k.width);
    } else if (const auto* positions = std::get_if<AddPositions>(&op)) {
      thread_floats_ = std::max(thread_floats_, positions->out.width);
    }
}

void CpuExecutable::allocate_scratch() {
  int64_t cols = 0;
  for (const WeightSpec& spec : program_.weights)
    if (spec.shape.size() > 1) cols = std::max(cols, spec.shape.back());
  thread_floats_ = round_up(thread_floats_, kAlignment);
  const int64_t threads = thread_floats_ * device_->threads.size() * static_cast<int64_t>(sizeof(float));
  scratch_ = std::make_unique<Mapping>(std::max(threads, linear_scratch_bytes(limits_.tokens, cols)), "scratch");
}

void CpuExecutable::run(const Step& step) {
  batch_.bind(step);
  for (RopeTurns& turns : turns_) turns.prepare(step);
  for (AttentionPlan& plan : plans_) plan.build(batch_, device_->threads.size());
  auto start = std::chrono::steady_clock::now();
  for (size_t i = 0; i < program_.ops.size(); ++i) {
    std::visit([this](const auto& each) { run(each); }, program_.ops[i]);
    const auto end = std::chrono::steady_clock::now();
    op_seconds_[i] += std::chrono::duration<double>(end - start).count();
    start = end;
  }
}

// --- ops ---

template <typename Body>
void CpuExecutable::over_rows(const View& view, int64_t floats_per_row, Body&& body) {
  const int64_t count = rows(view);
  const int64_t share = std::clamp<int64_t>(count / (2 * device_->threads.size()), 1, kShareRows);
  const int64_t grain = count * floats_per_row < kWorthThreads ? count : share;
  device_->threads.parallel_for(count, grain, [&](int64_t begin, int64_t end, int thread) { body(begin, end - begin, thread); });
}

void CpuExecutable::run(const Embed& op) {
  const PackedWeight& table = matrix(op.table);
  const PackedWeight* virtual_table = op.virtual_table == kNone ? nullptr : &matrix(op.virtual_table);
  const std::span<const int32_t> ids = batch_.step().ids;
  over_rows(op.out, op.out.width, [&](int64_t first, int64_t count, int) {
    for (int64_t row = first; row < first + count; ++row) {
      float* out = at(op.out) + row * stride(op.out);
      if (ids[row] >= program_.vocab) {
        unpack_row(*virtual_table, ids[row] - program_.vocab, out);
        continue;
      }
      unpack_row(table, ids[row], out);
      if (op.scale != 1) kernels_.scale(out, op.scale, op.out.width);
    }
  });
}

void CpuExecutable::run(const AddPositions& op) {
  const PackedWeight& table = matrix(op.table);
  const std::span<const int32_t> positions = batch_.step().positions;
  over_rows(op.out, op.out.width, [&](int64_t first, int64_t count, int thread) {
    for (int64_t row = first; row < first + count; ++row) {
      unpack_row(table, positions[row] / op.divisor + op.offset, scratch(thread));
      kernels_.add({.a = at(op.in) + row * stride(op.in),
                    .a_stride = 0,
                    .b = scratch(thread),
                    .b_stride = 0,
                    .out = at(op.out) + row * stride(op.out),
                    .out_stride = 0,
                    .rows = 1,
                    .width = op.out.width});
    }
  });
}

void CpuExecutable::run(const LogScale& op) {
  const std::span<const int32_t> positions = batch_.step().positions;
  const double whole = std::log(static_cast<double>(op.from));
  over_rows(op.x, op.x.width, [&](int64_t first, int64_t count, int) {
    for (int64_t row = first; row < first + count; ++row)
      if (positions[row] >= op.from)
        kernels_.scale(at(op.x) + row * stride(op.x), static_cast<float>(std::log(positions[row] + 1.0) / whole), op.x.width);
  });
}

void CpuExecutable::run(const Bound& op) {
  const int64_t in = stride(op.in), out = stride(op.out);
  over_rows(op.out, op.out.width, [&](int64_t first, int64_t count, int) {
    kernels_.bound({.in = at(op.in) + first * in,
                    .in_stride = in,
                    .out = at(op.out) + first * out,
                    .out_stride = out,
                    .rows = count,
                    .width = op.out.width,
                    .kind = op.kind,
                    .limit = op.limit});
  });
}

void CpuExecutable::run(const Norm& op) {
  const int64_t in = stride(op.in), out = stride(op.out);
  over_rows(op.out, op.out.width, [&](int64_t first, int64_t count, int) {
    kernels_.norm({.in = at(op.in) + first * in,
                   .in_stride = in,
                   .out = at(op.out) + first * out,
                   .out_stride = out,
                   .rows = count,
                   .groups = op.out.width / op.group,
                   .group = op.group,
                   .weight = vector(op.weight),
                   .bias = vector(op.bias),
                   .own = own_weights(op),
                   .kind = op.kind,
                   .eps = op.eps,
                   .weight_offset = op.weight_offset});
  });
}

void CpuExecutable::run(const Linear& op) {
  linear(device_->threads, device_->isa, scratch_->data(),
         {.weight = &matrix(op.weight),
          .x = at(op.in),
          .x_stride = stride(op.in),
          .tokens = rows(op.in),
          .out = at(op.out),
          .out_stride = stride(op.out),
          .bias = vector(op.bias),
          .residual = op.residual ? at(op.residual) : nullptr,
          .residual_stride = op.residual ? stride(op.residual) : 0,
          .quantize_activations = device_->quantize_activations});
}

void CpuExecutable::run(const HeadLinear& op) {
  const auto& weight = static_cast<const StackedWeight&>(*weights_[op.weight]);
  const int64_t in_head = op.in.width / op.heads, out_head = op.out.width / op.heads;
  const int64_t products = weight.matrix(0).rows(), cols = weight.matrix(0).cols();
  for (int64_t head = 0; head < op.heads; ++head)
    linear(device_->threads, device_->isa, scratch_->data(),
           {.weight = &weight.matrix(head),
            .x = at(op.in) + head * in_head,
            .x_stride = stride(op.in),
            .tokens = rows(op.in),
            .out = at(op.out) + head * out_head,
            .out_stride = stride(op.out),
            .quantize_activations = device_->quantize_activations});
  if (cols == in_head) return;
  over_rows(op.out, op.heads * (in_head - cols), [&](int64_t first, int64_t count, int) {
    for (int64_t row = first; row < first + count; ++row)
      for (int64_t head = 0; head < op.heads; ++head)
        std::copy_n(at(op.in) + row * stride(op.in) + head * in_head + cols, in_head - cols,
                    at(op.out) + row * stride(op.out) + head * out_head + products);
  });
}

void CpuExecutable::run(const GatedLinear& op) {
  linear(device_->threads, device_->isa, scratch_->data(),
         {.weight = &matrix(op.weight),
          .x = at(op.in),
          .x_stride = stride(op.in),
          .tokens = rows(op.in),
          .out = at(op.out),
          .out_stride = stride(op.out),
          .bias = vector(op.bias),
          .gated = true,
          .activation = op.kind,
          .quantize_activations = device_->quantize_activations});
}

void CpuExecutable::run(const Moe& op) {
  const auto stack = [&](WeightId id) { return static_cast<const StackedWeight*>(weights_[id].get()); };
  experts_.run(device_->threads, device_->isa, scratch_->data(),
               {.op = &op,
                .tokens = rows(op.out),
                .x = at(op.in),
                .x_stride = stride(op.in),
                .logits = at(op.logits),
                .logits_stride = stride(op.logits),
                .out = at(op.out),
                .out_stride = stride(op.out),
                .residual = op.residual ? at(op.residual) : nullptr,
                .residual_stride = op.residual ? stride(op.residual) : 0,
                .gate_up = stack(op.gate_up),
                .down = stack(op.down),
                .gate_up_bias = vector(op.gate_up_bias),
                .down_bias = vector(op.down_bias),
                .correction = op.routing.correction == kNone ? nullptr : program_.corrections[op.routing.correction].data(),
                .quantize_activations = device_->quantize_activations});
}

void CpuExecutable::run(const Rope& op) {
  const RopeTurns& turns = turns_[op.table];
  const int64_t row_stride = stride(op.x);
  over_rows(op.x, op.x.width, [&](int64_t first, int64_t count, int) {
    kernels_.rope({.x = at(op.x) + first * row_stride + op.offset,
                   .stride = row_stride,
                   .rows = count,
                   .heads = op.x.width / op.head_dim,
                   .head_dim = op.head_dim,
                   .rotary_dim = turns.table().rotary_dim,
                   .interleaved = turns.table().interleaved,
                   .turns = turns.tokens() + first});
  });
}

void CpuExecutable::fill(int32_t index, int64_t tokens, const float* keys, const float* values) {
  const KvLayer& layer = pages_.layer(index);
  std::vector<KvSlot> slots(tokens);
  for (int64_t i = 0; i < tokens; ++i) {
    const int64_t place = i % limits_.page_tokens;
    slots[i] = {i / limits_.page_tokens * pages_.page_bytes(), place / kBlockTokens, place % kBlockTokens};
  }
  kernels_.write_kv({.k = keys,
                     .k_stride = layer.kv_heads * layer.head_dim,
                     .v = values,
                     .v_stride = layer.kv_heads * layer.v_dim,
                     .rows = tokens,
                     .layer = layer,
                     .slots = slots.data()});
}

void CpuExecutable::run(const PrepareQkv& op) {
  const KvLayer& layer = pages_.layer(op.layer);
  const int64_t q_stride = stride(op.q), k_stride = stride(op.k), v_stride = stride(op.v);
  const auto prepare = [&](float* x, int64_t x_stride, int64_t first, int64_t count, int64_t heads, WeightId norm) {
    if (norm != kNone)
      kernels_.norm({.in = x,
                     .in_stride = x_stride,
                     .out = x,
                     .out_stride = x_stride,
                     .rows = count,
                     .groups = heads,
                     .group = op.head_dim,
                     .weight = vector(norm),
                     .bias = nullptr,
                     .own = 0,
                     .kind = NormKind::rms,
                     .eps = op.eps,
                     .weight_offset = op.weight_offset});
    if (op.rope_table != kNone) {
      const RopeTurns& turns = turns_[op.rope_table];
      kernels_.rope({.x = x,
                     .stride = x_stride,
                     .rows = count,
                     .heads = heads,
                     .head_dim = op.head_dim,
                     .rotary_dim = turns.table().rotary_dim,
                     .interleaved = turns.table().interleaved,
                     .turns = turns.tokens() + first});
    }
  };
  over_rows(op.q, kPrepareCost * (op.q.width + op.k.width + op.v.width), [&](int64_t begin, int64_t total, int thread) {
    for (int64_t first = begin; first < begin + total; first += kPrepareTokens) {
      const int64_t count = std::min(kPrepareTokens, begin + total - first);
      prepare(at(op.q) + first * q_stride, q_stride, first, count, op.heads, op.q_norm);
      float* k = scratch(thread);  // (count, kv_heads * head_dim)
      for (int64_t i = 0; i < count; ++i) std::copy_n(at(op.k) + (first + i) * k_stride, op.k.width, k + i * op.k.width);
      prepare(k, op.k.width, first, count, op.kv_heads, op.k_norm);
      kernels_.write_kv({.k = k,
                         .k_stride = op.k.width,
                         .v = at(op.v) + first * v_stride,
                         .v_stride = v_stride,
                         .rows = count,
                         .layer = layer,
                         .slots = batch_.slots() + first});
    }
  });
}

void CpuExecutable::run(const Attention& op) {
  const KvLayer& layer = pages_.layer(op.layer);
  if (op.k)
    over_rows(op.k, op.k.width + op.v.width, [&](int64_t first, int64_t count, int) {
      kernels_.write_kv({.k = at(op.k) + first * stride(op.k),
                         .k_stride = stride(op.k),
                         .v = op.v ? at(op.v) + first * stride(op.v) : nullptr,
                         .v_stride = op.v ? stride(op.v) : 0,
                         .rows = count,
                         .layer = layer,
                         .slots = batch_.slots() + first});
    });
  const AttentionForm form = form_of(op);
  const auto plan = std::find_if(plans_.begin(), plans_.end(), [&](const AttentionPlan& each) { return each.form() == form; });
  plan->run(device_->threads, attention_kernels(device_->isa), batch_,
            {.q = at(op.q),
             .q_stride = stride(op.q),
             .out = at(op.out),
             .out_stride = stride(op.out),
             .scale = op.scale,
             .soft_cap = op.soft_cap,
             .slopes = op.alibi == kNone ? nullptr : program_.alibi_slopes[op.alibi].data(),
             .sinks = vector(op.sinks),
             .layer = layer,
             .scratch = scratch(0),
             .scratch_floats = thread_floats_});
}

void CpuExecutable::run(const Activation& op) {
  const int64_t gate = stride(op.gate), up = op.up ? stride(op.up) : 0, out = stride(op.out);
  over_rows(op.out, op.out.width, [&](int64_t first, int64_t count, int) {
    kernels_.activation({.gate = at(op.gate) + first * gate,
                         .gate_stride = gate,
                         .up = op.up ? at(op.up) + first * up : nullptr,
                         .up_stride = up,
                         .out = at(op.out) + first * out,
                         .out_stride = out,
                         .rows = count,
                         .width = op.out.width,
                         .kind = op.kind});
  });
}

void CpuExecutable::run(const Add& op) {
  const int64_t a = stride(op.a), b = stride(op.b), out = stride(op.out);
  over_rows(op.out, op.out.width, [&](int64_t first, int64_t count, int) {
    kernels_.add({.a = at(op.a) + first * a,
                  .a_stride = a,
                  .b = at(op.b) + first * b,
                  .b_stride = b,
                  .out = at(op.out) + first * out,
                  .out_stride = out,
                  .rows = count,
                  .width = op.out.width});
  });
}

void CpuExecutable::run(const Select& op) {
  const std::span<const int32_t> wanted = batch_.step().logit_rows;
  for (size_t row = 0; row < wanted.size(); ++row)
    std::copy_n(at(op.in) + wanted[row] * stride(op.in), op.in.width, at(op.out) + static_cast<int64_t>(row) * stride(op.out));
}

void CpuExecutable::run(const Pool& op) {
  const std::span<const int32_t> wanted = batch_.step().logit_rows;
  for (size_t row = 0; row < wanted.size(); ++row) {
    float* const out = at(op.out) + static_cast<int64_t>(row) * stride(op.out);
    auto [begin, end] = batch_.step().brought_with(wanted[row]);
    if (op.kind == PoolKind::first) end = begin + 1;
    if (op.kind == PoolKind::last) begin = wanted[row], end = begin + 1;
    std::copy_n(at(op.in) + begin * stride(op.in), op.in.width, out);
    for (int64_t token = begin + 1; token < end; ++token)
      for (int64_t c = 0; c < op.in.width; ++c) out[c] += at(op.in)[token * stride(op.in) + c];
    if (end - begin > 1)
      for (int64_t c = 0; c < op.in.width; ++c) out[c] /= static_cast<float>(end - begin);
  }
}

// --- access ---

std::span<const float> CpuExecutable::logits() {
  MAGA_CHECK(program_.logits != kNone, "the program has no logits");
  return {values_[program_.logits], static_cast<size_t>(batch_.logit_rows() * program_.values[program_.logits].width)};
}

void CpuExecutable::write_value(ValueId value, std::span<const float> rows) {
  MAGA_CHECK(static_cast<int64_t>(rows.size()) <= capacity(value) * program_.values[value].width, rows.size(), " floats for value ",
             program_.values[value].name);
  std::copy(rows.begin(), rows.end(), values_[value]);
}

std::vector<float> CpuExecutable::read_value(ValueId value, int64_t rows) {
  MAGA_CHECK(rows >= 0 && rows <= capacity(value), rows, " rows of value ", program_.values[value].name);
  return {values_[value], values_[value] + rows * program_.values[value].width};
}

int64_t CpuExecutable::buffer_bytes() const {
  int64_t bytes = arena_->bytes() + scratch_->bytes() + experts_.bytes() + (partials_ ? partials_->bytes() : 0);
  for (const RopeTurns& turns : turns_) bytes += turns.bytes();
  return bytes;
}

int64_t CpuExecutable::capacity(ValueId value) const {
  return program_.values[value].rows == Rows::tokens ? limits_.tokens : limits_.logit_rows;
}

const PackedWeight& CpuExecutable::matrix(WeightId weight) const { return static_cast<const PackedWeight&>(*weights_[weight]); }

const float* CpuExecutable::vector(WeightId weight) const {
  return weight == kNone ? nullptr : static_cast<const VectorWeight&>(*weights_[weight]).data();
}

int64_t CpuExecutable::own_weights(const Norm& op) const {
  const WeightId given = op.weight != kNone ? op.weight : op.bias;
  return given == kNone || program_.weights[given].shape[0] == op.group ? 0 : op.group;
}

AttentionForm CpuExecutable::form_of(const Attention& op) const {
  return {.kv_heads = op.kv_heads,
          .group = op.heads / op.kv_heads,
          .head_dim = op.head_dim,
          .v_dim = program_.cache_layers[op.layer].v_dim,
          .window = op.window};
}

}  // namespace maga::cpu
