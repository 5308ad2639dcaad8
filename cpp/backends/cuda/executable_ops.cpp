// Each op as kernels.
#include <utility>

#include "backends/cuda/cuda_check.h"
#include "backends/cuda/executable.h"
#include "backends/cuda/head_linear.h"
#include "backends/cuda/linear_affine.h"

namespace maga::cuda {

void CudaExecutable::run(const Embed& op) {
  const EmbedArgs args{.table = data(op.table),
                       .virtual_table = data(op.virtual_table),
                       .out = matrix(op.out),
                       .vocab = static_cast<int>(program_.vocab),
                       .width = static_cast<int>(op.out.width),
                       .scale = op.scale};
  const WeightLayout& layout = weight(op.table).layout();
  if (layout.form == WeightForm::affine)
    affine_embed(queue_, device_->compute, layout.affine, step_, args);
  else
    embed(queue_, device_->compute, step_, args);
}

void CudaExecutable::run(const AddPositions& op) {
  add_positions(queue_, device_->compute, step_,
                {.in = matrix(op.in),
                 .out = matrix(op.out),
                 .table = data(op.table),
                 .offset = op.offset,
                 .width = static_cast<int>(op.out.width),
                 .divisor = static_cast<int>(op.divisor)});
}

void CudaExecutable::run(const LogScale& op) {
  log_scale(queue_, device_->compute, step_, {.x = matrix(op.x), .width = static_cast<int>(op.x.width), .from = op.from});
}

void CudaExecutable::run(const Bound& op) {
  const DType type = type_of(op.out.value);
  MAGA_CHECK(type_of(op.in.value) == type, "a bound from ", name_of(type_of(op.in.value)), " to ", name_of(type));
  bound(queue_, type,
        {.in = matrix(op.in),
         .out = matrix(op.out),
         .rows = rows(op.out),
         .width = static_cast<int>(op.out.width),
         .kind = op.kind,
         .limit = op.limit});
}

int CudaExecutable::own_weights(const Norm& op) const {
  const WeightId given = op.weight != kNone ? op.weight : op.bias;
  return given == kNone || program_.weights[given].shape[0] == op.group ? 0 : static_cast<int>(op.group);
}

void CudaExecutable::run(const Norm& op) {
  NormArgs args{.in = matrix(op.in),
                .out = matrix(op.out),
                .rows = rows(op.out),
                .width = static_cast<int>(op.out.width),
                .group = static_cast<int>(op.group),
                .weight = data(op.weight),
                .bias = data(op.bias),
                .own = own_weights(op),
                .kind = op.kind,
                .eps = op.eps,
                .weight_offset = op.weight_offset};
  if (pending_) {
    args.slabs = pending_->slabs;
    args.residual = pending_->residual;
    args.sum = pending_->out;
    pending_.reset();
  }
  if (rounds_next_ && takes_rounded(args.rows, args.width) && norm_rounds(device_->compute, args)) {
    args.rounded = quantized_tokens(widened_.data(), args.rows, args.width);
    rounded_ = true;
  }
  norm(queue_, device_->compute, args);
}

LinearArgs CudaExecutable::linear_args(const View& in, const View& out, WeightId id, WeightId bias) const {
  const Matrix x = matrix(in), y = matrix(out);
  return {.weight = data(id),
          .layout = weight(id).layout(),
          .x = x.data,
          .x_stride = x.stride,
          .m = rows(in),
          .n = static_cast<int>(out.width),
          .k = static_cast<int>(in.width),
          .type = device_->compute,
          .out = y.data,
          .out_stride = y.stride,
          .out_type = type_of(out.value),
          .bias = data(bias),
          .scratch = scratch_.data(),
          .widened = widened_.data()};
}

void CudaExecutable::run(const Linear& op) {
  LinearArgs args = linear_args(op.in, op.out, op.weight, op.bias);
  const Matrix residual = op.residual ? matrix(op.residual) : Matrix{};
  args.residual = residual.data;
  args.residual_stride = residual.stride;
  args.rounded = std::exchange(rounded_, false);
  if (args.m == 0) return;
  const int slabs = args.out_type == device_->compute ? slabs_of(args) : 0;
  if (slabs > 0) {
    args.slabs = slabs_.as<float>();
    pending_ = Pending{.slabs = {.data = args.slabs, .count = slabs, .bias = args.bias},
                       .residual = residual,
                       .out = {args.out, args.out_stride},
                       .rows = args.m,
                       .width = args.n};
    args.bias = args.residual = nullptr;
  }
  device_->linears->run(queue_, args);
}

void CudaExecutable::add_up_pending() {
  reduce(queue_, device_->compute,
         {.slabs = pending_->slabs,
          .residual = pending_->residual,
          .out = pending_->out,
          .rows = pending_->rows,
          .width = pending_->width});
  pending_.reset();
}

void CudaExecutable::run(const HeadLinear& op) {
  const auto& shape = program_.weights[op.weight].shape;
  head_linear(queue_, device_->compute,
              {.in = matrix(op.in),
               .out = matrix(op.out),
               .weight = data(op.weight),
               .tokens = rows(op.in),
               .heads = static_cast<int>(op.heads),
               .n = static_cast<int>(shape[1]),
               .k = static_cast<int>(shape[2]),
               .rest = static_cast<int>(op.in.width / op.heads - shape[2])});
}

void CudaExecutable::run(const GatedLinear& op) {
  LinearArgs args = linear_args(op.in, op.out, op.weight, op.bias);
  args.gated = true;
  args.activation = op.kind;
  args.rounded = std::exchange(rounded_, false);
  if (args.m > 0) device_->linears->run(queue_, args);
}

void CudaExecutable::run(const Moe& op) {
  const Matrix logits = matrix(op.logits);
  const bool tokens = program_.values[op.out.value].rows == Rows::tokens;
  if (rows(op.out) == 0) return;
  experts_->run(queue_,
                {.op = &op,
                 .rows = rows(op.out),
                 .real_rows = tokens ? step_.sequence_start + step_.sequences : nullptr,
                 .logits = static_cast<const float*>(logits.data),
                 .logits_stride = logits.stride,
                 .x = matrix(op.in),
                 .residual = op.residual ? matrix(op.residual) : Matrix{},
                 .out = matrix(op.out),
                 .gate_up = data(op.gate_up),
                 .down = data(op.down),
                 .gate_up_layout = weight(op.gate_up).layout(),
                 .down_layout = weight(op.down).layout(),
                 .gate_up_bias = data(op.gate_up_bias),
                 .down_bias = data(op.down_bias),
                 .correction = op.routing.correction == kNone ? nullptr : corrections_[op.routing.correction].as<const float>()});
}

void CudaExecutable::run(const Rope& op) {
  const RopeTable& table = program_.rope_tables[op.table];
  rope(queue_, device_->compute,
       {.x = matrix({op.x.value, op.x.offset + op.offset, op.x.width}),
        .rows = rows(op.x),
        .heads = static_cast<int>(op.x.width / op.head_dim),
        .head_dim = static_cast<int>(op.head_dim),
        .rotary_dim = static_cast<int>(table.rotary_dim),
        .interleaved = table.interleaved,
        .turns = turns_[op.table].as<const float2>()});
}

KvLayer CudaExecutable::kv_layer(int32_t layer) const {
  const CacheLayer& form = program_.cache_layers[layer];
  const DType type = limits_.kv_dtype(layer);
  const int64_t size = size_of(type), entries = form.kv_heads * limits_.page_tokens;
  const int64_t v_stride = form.values_in_keys ? form.head_dim : form.v_dim;
  std::byte* k = const_cast<std::byte*>(pool_.data()) + layer_offset_[layer];
  std::byte* v = form.values_in_keys ? k : k + entries * form.head_dim * size;
  auto* scales = is_code(type) ? reinterpret_cast<uint16_t*>(v + entries * form.v_dim) : nullptr;
  return {.k = k,
          .v = v,
          .page_stride = page_bytes_ / size,
          .k_head_stride = limits_.page_tokens * form.head_dim,
          .v_head_stride = limits_.page_tokens * v_stride,
          .page_tokens = static_cast<int>(limits_.page_tokens),
          .kv_heads = static_cast<int>(form.kv_heads),
          .head_dim = static_cast<int>(form.head_dim),
          .v_dim = static_cast<int>(form.v_dim),
          .values_in_keys = form.values_in_keys,
          .k_scales = scales,
          .v_scales = scales ? scales + entries : nullptr,
          .scale_stride = page_bytes_ / static_cast<int64_t>(sizeof(uint16_t)),
          .k_scale = form.k_scale,
          .v_scale = form.v_scale};
}

void CudaExecutable::run(const PrepareQkv& op) {
  PrepareArgs args{.q = matrix(op.q),
                   .k = matrix(op.k),
                   .v = matrix(op.v),
                   .rows = rows(op.q),
                   .heads = static_cast<int>(op.heads),
                   .kv_heads = static_cast<int>(op.kv_heads),
                   .q_norm = data(op.q_norm),
                   .k_norm = data(op.k_norm),
                   .eps = op.eps,
                   .weight_offset = op.weight_offset,
                   .layer = kv_layer(op.layer),
                   .kv_type = limits_.kv_dtype(op.layer)};
  if (op.rope_table != kNone) {
    const RopeTable& table = program_.rope_tables[op.rope_table];
    args.rotary_dim = static_cast<int>(table.rotary_dim);
    args.interleaved = table.interleaved;
    args.turns = turns_[op.rope_table].as<const float2>();
  }
  own_keys_ = {};
  const AttentionPlan* plan = layer_plans_[op.layer];
  const bool wanted = plan && plan->wants_own_keys();
  if (pending_ && wanted && plan->needs_own_keys()) add_up_pending();
  if (pending_) {
    args.slabs = pending_->slabs;
    pending_.reset();
  } else if (wanted) {
    args.keep_k = true;
    own_keys_ = {.layer = op.layer, .k = args.k, .v = args.v};
  }
  prepare_qkv(queue_, device_->compute, step_, args);
}

void CudaExecutable::run(const Attention& op) {
  const KvLayer layer = kv_layer(op.layer);
  OwnKeys own = own_keys_.layer == op.layer ? own_keys_ : OwnKeys{};
  if (op.k) {
    own = {.layer = op.layer, .k = matrix(op.k), .v = matrix(op.v ? op.v : op.k)};
    prepare_qkv(queue_, device_->compute, step_,
                {.k = own.k,
                 .v = own.v,
                 .rows = rows(op.k),
                 .kv_heads = static_cast<int>(op.kv_heads),
                 .layer = layer,
                 .kv_type = limits_.kv_dtype(op.layer)});
  }
  const Matrix q = matrix(op.q), out = matrix(op.out);
  plan_of(op).run(queue_, step_,
                  {.q = q.data,
                   .q_stride = q.stride,
                   .out = out.data,
                   .out_stride = out.stride,
                   .scale = op.scale,
                   .soft_cap = op.soft_cap,
                   .alibi_slopes = op.alibi == kNone ? nullptr : alibi_slopes_[op.alibi].as<const float>(),
                   .sinks = data(op.sinks),
                   .layer = layer,
                   .k = own.k.data,
                   .v = own.v.data,
                   .k_stride = own.k.stride,
                   .v_stride = own.v.stride,
                   .after_prepare = op.k || after_prepare_});
}

void CudaExecutable::run(const Activation& op) {
  activation(queue_, device_->compute,
             {.gate = matrix(op.gate),
              .up = op.up ? matrix(op.up) : Matrix{},
              .out = matrix(op.out),
              .rows = rows(op.out),
              .width = static_cast<int>(op.out.width),
              .kind = op.kind});
}

void CudaExecutable::run(const Add& op) {
  add(queue_, device_->compute,
      {.a = matrix(op.a), .b = matrix(op.b), .out = matrix(op.out), .rows = rows(op.out), .width = static_cast<int>(op.out.width)});
}

void CudaExecutable::run(const Select& op) {
  select(queue_, device_->compute, step_, {.in = matrix(op.in), .out = matrix(op.out), .width = static_cast<int>(op.out.width)});
}

void CudaExecutable::run(const Pool& op) {
  pool(queue_, device_->compute, step_,
       {.in = matrix(op.in),
        .out = matrix(op.out),
        .width = static_cast<int>(op.out.width),
        .kind = op.kind,
        .out_f32 = type_of(op.out.value) == DType::f32});
}

}  // namespace maga::cuda
