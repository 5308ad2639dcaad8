// Steps: staged, launched as a graph or kernel by kernel, collected.
#include "backends/cuda/executable.h"

#include <algorithm>
#include <numeric>

#include "backends/cuda/cuda_check.h"
#include "backends/cuda/sample.h"

namespace maga::cuda {
namespace {

// Batches that have a graph of their own; between two of them a batch is padded to the larger.
constexpr int kBuckets[] = {1,   2,   4,   8,   12,  16,  20,  24,  28,  32,  40,  48,  56,  64,  80,  96,  112,
                            128, 144, 160, 176, 192, 208, 224, 240, 256, 320, 384, 448, 512, 640, 768, 896, 1024};

int bucket_of(int64_t sequences) {
  const auto at = std::lower_bound(std::begin(kBuckets), std::end(kBuckets), sequences);
  return at == std::end(kBuckets) ? 0 : *at;
}

// Each sequence brings one token, and every token needs its logits.
bool is_decode(const Step& step) {
  return step.tree.empty() && step.context.empty() && step.tokens() == step.sequences() &&
         step.logit_rows.size() == step.ids.size() &&
         std::adjacent_find(step.sequence_start.begin(), step.sequence_start.end()) == step.sequence_start.end();
}

}  // namespace

StepShape CudaExecutable::shape_of(const Step& step, int64_t draws) const {
  const auto rows = static_cast<int>(step.logit_rows.size());
  if (is_decode(step) && draws <= rows) {
    const int bucket = bucket_of(rows);
    if (bucket > 0 && bucket <= std::min({limits_.tokens, limits_.sequences, limits_.logit_rows}))
      return {.tokens = bucket, .sequences = bucket, .rows = bucket, .draws = bucket, .blocks = bounds_.by_block};
  }
  return {.tokens = static_cast<int>(step.tokens()),
          .sequences = static_cast<int>(step.sequences()),
          .rows = rows,
          .draws = static_cast<int>(draws),
          .tree = !step.tree.empty(),
          .context = !step.context.empty(),
          .blocks = bounds_.by_block};
}

void CudaExecutable::forward(const DeviceStep& step, const Step* host) {
  step_ = step;
  step_.chosen = chosen_.as<int32_t>();
  pending_.reset();
  own_keys_ = {};
  rounded_ = false;
  for (size_t i = 0; i < program_.rope_tables.size(); ++i) {
    const RopeTable& table = program_.rope_tables[i];
    rope_turns(queue_, step_,
               {.inv_freq = inv_freqs_[i].as<const float>(),
                .rotary_dim = static_cast<int>(table.rotary_dim),
                .multiplier = table.multiplier,
                .positions = table.by_block ? step_.block_positions : step_.positions,
                .theta = table.theta,
                .dynamic_factor = table.dynamic_factor,
                .stepped = table.stepped,
                .long_inv_freq = table.long_inv_freq.empty() ? nullptr : inv_freqs_[i].as<const float>() + table.rotary_dim / 2,
                .max_positions = table.max_positions,
                .turns = turns_[i].as<float2>()});
  }
  for (const auto& plan : plans_) plan->plan(queue_, step_, host);
  for (size_t i = 0; i < program_.ops.size(); ++i) {
    after_prepare_ = i > 0 && std::holds_alternative<PrepareQkv>(program_.ops[i - 1]);
    if (pending_ && !adds_up_[i]) add_up_pending();
    rounds_next_ = rounds_[i];
    std::visit([this](const auto& op) { run(op); }, program_.ops[i]);
  }
  if (pending_) add_up_pending();
}

// All that a first decode step would otherwise wait for.
void CudaExecutable::capture_graphs() {
  const int32_t none[] = {0};
  const Step padding{.ids = {},
                     .positions = {},
                     .sequence_start = none,
                     .kv_length = {},
                     .prompt_length = {},
                     .page_start = none,
                     .pages = {},
                     .logit_rows = {},
                     .tree = {},
                     .context = {},
                     .block_positions = {}};
  for (const int bucket : kBuckets) {
    if (bucket > std::min({limits_.tokens, limits_.sequences, limits_.logit_rows})) break;
    const StepShape shape{.tokens = bucket, .sequences = bucket, .rows = bucket, .draws = bucket, .blocks = bounds_.by_block};
    staging_->stage(queue_, 0, shape, padding, {}, true);
    launch(shape, padding);
    MAGA_CUDA(cudaStreamSynchronize(stream_.get()));  // the next step is staged in the same memory
  }
}

// The kernels of a staged step and its draws.
void CudaExecutable::launch(const StepShape& shape, const Step& step) {
  const bool decode = shape.draws == shape.tokens && is_decode(step);
  const auto enqueue_all = [&](const Step* host) {
    forward(staging_->step(shape), host);
    if (shape.draws == 0) return;
    MAGA_CHECK(!program_.embeds && program_.logits != kNone, "the program has no logits to draw from");
    sample(queue_, {.logits = reinterpret_cast<const float*>(arena_.data() + offsets_[program_.logits]),
                    .vocab = static_cast<int>(program_.vocab),
                    .draws = staging_->draws(shape),
                    .count = shape.draws,
                    .chosen = chosen_.as<int32_t>(),
                    .result = drawn_.as<Drawn>(),
                    .scratch = sample_scratch_.data()});
  };
  if (!decode) return enqueue_all(&step);
  auto found = graphs_.find(shape.tokens);
  if (found == graphs_.end()) {
    // The first time it runs kernel by kernel, so that whatever is set up lazily is set up outside the capture.
    enqueue_all(nullptr);
    graphs_.emplace(shape.tokens, Graph(stream_.get(), [&] { enqueue_all(nullptr); }));
    return;
  }
  found->second.launch(stream_.get());
}

void CudaExecutable::enqueue(const Step& step, std::span<const Draw> draws) {
  use_device(device_->id);
  MAGA_CHECK(enqueued_ - collected_ < kStepsInFlight, "more than ", kStepsInFlight, " steps in flight");
  Slot& slot = slots_[enqueued_ % kStepsInFlight];
  const int64_t earlier = enqueued_ > 0 ? slots_[(enqueued_ - 1) % kStepsInFlight].draws : 0;
  check_step(step, limits_, bounds_, earlier);
  MAGA_CHECK(static_cast<int64_t>(draws.size()) <= limits_.logit_rows, draws.size(), " draws, limit ", limits_.logit_rows);
  for (const Draw& draw : draws)
    MAGA_CHECK(draw.row >= 0 && draw.row < static_cast<int32_t>(step.logit_rows.size()), "draw from row ", draw.row, " of ",
               step.logit_rows.size());
  const StepShape shape = shape_of(step, static_cast<int64_t>(draws.size()));
  staging_->stage(queue_, static_cast<int>(enqueued_ % kStepsInFlight), shape, step, draws, page_bytes_ > 0);
  launch(shape, step);
  if (!draws.empty())
    MAGA_CUDA(
        cudaMemcpyAsync(slot.drawn.data(), drawn_.data(), draws.size() * sizeof(Drawn), cudaMemcpyDeviceToHost, stream_.get()));
  MAGA_CUDA(cudaEventRecord(slot.done.get(), stream_.get()));
  slot.draws = static_cast<int64_t>(draws.size());
  slot.rows = static_cast<int64_t>(step.logit_rows.size());
  ++enqueued_;
}

std::span<const Drawn> CudaExecutable::collect() {
  use_device(device_->id);
  MAGA_CHECK(collected_ < enqueued_, "no step is in flight");
  Slot& slot = slots_[collected_++ % kStepsInFlight];
  MAGA_CUDA(cudaEventSynchronize(slot.done.get()));
  logit_rows_ = slot.rows;
  return {slot.drawn.as<const Drawn>(), static_cast<size_t>(slot.draws)};
}

// Errors of kernels stay with the context: every call fails from then on.
bool CudaExecutable::lost() const {
  const cudaError_t error = cudaStreamQuery(stream_.get());
  return error != cudaSuccess && error != cudaErrorNotReady;
}

void CudaExecutable::run(const Step& step) {
  use_device(device_->id);
  MAGA_CHECK(enqueued_ == collected_, "steps are in flight");
  check_step(step, limits_, bounds_);
  const StepShape shape{.tokens = static_cast<int>(step.tokens()),
                        .sequences = static_cast<int>(step.sequences()),
                        .rows = static_cast<int>(step.logit_rows.size()),
                        .draws = 0,
                        .tree = !step.tree.empty(),
                        .context = !step.context.empty(),
                        .blocks = bounds_.by_block};
  staging_->stage(queue_, 0, shape, step, {}, page_bytes_ > 0);
  forward(staging_->step(shape), &step);
  MAGA_CUDA(cudaStreamSynchronize(stream_.get()));
  logit_rows_ = static_cast<int64_t>(step.logit_rows.size());
}

std::span<const float> CudaExecutable::logits() {
  use_device(device_->id);
  MAGA_CHECK(program_.logits != kNone, "the program has no logits");
  const int64_t bytes = logit_rows_ * program_.logits_width() * static_cast<int64_t>(sizeof(float));
  if (logits_.bytes() < bytes) logits_ = PinnedMemory(bytes, "logits");
  MAGA_CUDA(cudaMemcpyAsync(logits_.data(), arena_.data() + offsets_[program_.logits], static_cast<size_t>(bytes),
                            cudaMemcpyDeviceToHost, stream_.get()));
  MAGA_CUDA(cudaStreamSynchronize(stream_.get()));
  return {logits_.as<const float>(), static_cast<size_t>(logit_rows_ * program_.logits_width())};
}

void CudaExecutable::copy_page(int32_t from, int32_t to) {
  use_device(device_->id);
  MAGA_CHECK(from >= 0 && from < limits_.pages && to >= 0 && to < limits_.pages, "page ", from, " to page ", to, " of ",
             limits_.pages);
  if (from == to) return;
  MAGA_CUDA(cudaMemcpyAsync(pool_.data() + to * page_bytes_, pool_.data() + from * page_bytes_, static_cast<size_t>(page_bytes_),
                            cudaMemcpyDeviceToDevice, stream_.get()));
}

// Written as a step's keys and values are, in fp32, to the pages from 0 on.
void CudaExecutable::fill(int32_t index, int64_t tokens, const float* keys, const float* values) {
  use_device(device_->id);
  const KvLayer layer = kv_layer(index);
  const int64_t k_width = int64_t{layer.kv_heads} * layer.head_dim, v_width = int64_t{layer.kv_heads} * layer.v_dim;
  std::vector<int64_t> slots(static_cast<size_t>(tokens));
  std::iota(slots.begin(), slots.end(), 0);
  const DeviceMemory k(tokens * k_width * static_cast<int64_t>(sizeof(float)), "given keys");
  const DeviceMemory v(tokens * v_width * static_cast<int64_t>(sizeof(float)), "given values");
  const DeviceMemory places(tokens * static_cast<int64_t>(sizeof(int64_t)), "places of given keys");
  copy_in(k, {keys, static_cast<size_t>(tokens * k_width)});
  copy_in(v, {values, static_cast<size_t>(tokens * v_width)});
  MAGA_CUDA(cudaMemcpyAsync(places.data(), slots.data(), slots.size() * sizeof(int64_t), cudaMemcpyHostToDevice, stream_.get()));
  prepare_qkv(queue_, DType::f32, {.tokens = static_cast<int>(tokens), .slots = places.as<const int64_t>()},
              {.k = {const_cast<std::byte*>(k.data()), k_width},
               .v = {const_cast<std::byte*>(v.data()), v_width},
               .rows = static_cast<int>(tokens),
               .kv_heads = layer.kv_heads,
               .layer = layer,
               .kv_type = limits_.kv_dtype(index)});
  MAGA_CUDA(cudaStreamSynchronize(stream_.get()));
}

// --- values ---

// On the stream of the kernels that will read it: a copy on another one may still be under way when it returns.
void CudaExecutable::copy_in(const DeviceMemory& to, std::span<const float> from) {
  MAGA_CUDA(cudaMemcpyAsync(to.data(), from.data(), from.size_bytes(), cudaMemcpyHostToDevice, stream_.get()));
}

Matrix CudaExecutable::matrix(const View& view) const {
  const DType type = type_of(view.value);
  return {.data = const_cast<std::byte*>(arena_.data()) + offsets_[view.value] + view.offset * size_of(type),
          .stride = program_.values[view.value].width};
}

void CudaExecutable::write_value(ValueId value, std::span<const float> rows) {
  use_device(device_->id);
  const int64_t width = program_.values[value].width, count = static_cast<int64_t>(rows.size()) / width;
  MAGA_CHECK(count * width == static_cast<int64_t>(rows.size()) && count <= capacity(value), rows.size(), " floats for value ",
             program_.values[value].name);
  const DeviceMemory staged(static_cast<int64_t>(rows.size_bytes()), "a value");
  copy_in(staged, rows);
  narrow(queue_, type_of(value), staged.as<const float>(), {arena_.data() + offsets_[value], width}, count,
         static_cast<int>(width));
  MAGA_CUDA(cudaStreamSynchronize(stream_.get()));
}

std::vector<float> CudaExecutable::read_value(ValueId value, int64_t rows) {
  use_device(device_->id);
  const int64_t width = program_.values[value].width;
  MAGA_CHECK(rows >= 0 && rows <= capacity(value), rows, " rows of value ", program_.values[value].name);
  std::vector<float> result(static_cast<size_t>(rows * width));
  const DeviceMemory staged(rows * width * static_cast<int64_t>(sizeof(float)), "a value");
  widen(queue_, type_of(value), {arena_.data() + offsets_[value], width}, staged.as<float>(), rows, static_cast<int>(width));
  MAGA_CUDA(cudaMemcpyAsync(result.data(), staged.data(), result.size() * sizeof(float), cudaMemcpyDeviceToHost, stream_.get()));
  MAGA_CUDA(cudaStreamSynchronize(stream_.get()));
  return result;
}

}  // namespace maga::cuda
