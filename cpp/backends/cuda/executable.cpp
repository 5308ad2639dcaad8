#include "backends/cuda/executable.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "backends/check_step.h"
#include "backends/cuda/cuda_check.h"
#include "backends/cuda/sample.h"
#include "program/access.h"
#include "program/buffers.h"

namespace maga::cuda {
namespace {

constexpr int64_t kAlignment = 256;
// Kernels for few tokens read their rows in tiles of up to this many.
constexpr int64_t kRowTile = 64;
// Batches that have a graph of their own; between two of them a batch is padded to the larger.
constexpr int kBuckets[] = {1,  2,   4,   8,   12,  16,  20,  24,  28,  32,  40,  48,  56,  64,  80,
                            96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256, 320, 384, 448, 512};
// For graphs, the driver, cuBLASLt and fragments: what nobody here counts.
constexpr int64_t kReserveBytes = int64_t{512} << 20;

int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

int bucket_of(int64_t sequences) {
  const auto at = std::lower_bound(std::begin(kBuckets), std::end(kBuckets), sequences);
  return at == std::end(kBuckets) ? 0 : *at;
}

// Each sequence brings one token, and every token needs its logits.
bool is_decode(const Step& step) {
  return step.tree.empty() && step.tokens() == step.sequences() && step.logit_rows.size() == step.ids.size() &&
         std::adjacent_find(step.sequence_start.begin(), step.sequence_start.end()) == step.sequence_start.end();
}

}  // namespace

CudaExecutable::CudaExecutable(std::shared_ptr<Device> device, Program program, std::vector<std::shared_ptr<const Weight>> weights,
                               const Limits& limits)
    : device_(std::move(device)),
      program_(std::move(program)),
      weights_(std::move(weights)),
      limits_(limits),
      queue_{.stream = stream_.get(), .overlap = device_->capability >= 90},
      page_bytes_(maga::page_bytes(program_, limits.page_tokens, limits.kv_dtype)) {
  MAGA_REQUIRE(limits_.page_tokens >= 16 && (limits_.page_tokens & (limits_.page_tokens - 1)) == 0, "K/V pages of ",
               limits_.page_tokens, " tokens: the CUDA backend takes powers of two from 16 on");
  check_weights();
  plan_lowering();
  place_values();
  allocate_scratch();
  if (limits_.pages == 0 && page_bytes_ > 0) {
    // Room is measured after the largest step has run once, with pages enough for it.
    make_pages(limits_.tokens / limits_.page_tokens + limits_.sequences);
    warm_up(limits_.tokens);
    for (auto tokens = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(limits_.tokens))); tokens > 512; tokens /= 2)
      warm_up(tokens);
    limits_.pages = 0;
    pool_ = {};
    make_pages(pages_that_fit());
    capture_graphs();
  } else {
    make_pages(limits_.pages);
  }
}

CudaExecutable::~CudaExecutable() {
  cudaSetDevice(device_->id);
  cudaStreamSynchronize(stream_.get());
}

void CudaExecutable::check_weights() const {
  MAGA_CHECK(weights_.size() == program_.weights.size(), weights_.size(), " weights for a program of ", program_.weights.size());
  for (size_t i = 0; i < weights_.size(); ++i) {
    const auto* packed = dynamic_cast<const DeviceWeight*>(weights_[i].get());
    MAGA_CHECK(packed && packed->type() == device_->compute, program_.weights[i].name, " was not packed by this CUDA backend");
    MAGA_CHECK(packed->shape() == program_.weights[i].shape, program_.weights[i].name, " is packed in another shape");
  }
}

// Finds the ops that can add up a linear's slabs: the norm of its result, or the PrepareQkv of its q, k and v.
void CudaExecutable::plan_lowering() {
  const auto& ops = program_.ops;
  adds_up_.assign(ops.size() + 1, false);
  const auto kept = [&](ValueId value) {
    return value == program_.logits || std::count(program_.outputs.begin(), program_.outputs.end(), value) > 0;
  };
  for (size_t i = 0; i + 1 < ops.size(); ++i) {
    const auto* linear = std::get_if<Linear>(&ops[i]);
    if (!linear || type_of(linear->out.value) != device_->compute) continue;
    if (const auto* norm = std::get_if<Norm>(&ops[i + 1]))
      adds_up_[i + 1] = norm->in == linear->out && norm->group == linear->out.width && !overlap(norm->out, norm->in);
    if (const auto* prepare = std::get_if<PrepareQkv>(&ops[i + 1])) {
      const View &q = prepare->q, &k = prepare->k, &v = prepare->v;
      bool whole = !linear->residual && q.value == linear->out.value && k.value == q.value && v.value == q.value &&
                   q.offset == linear->out.offset && k.offset == q.offset + q.width && v.offset == k.offset + k.width &&
                   v.offset + v.width == linear->out.offset + linear->out.width && !kept(q.value);
      // In that case k and v stay where they are, in the slabs.
      for (size_t later = i + 2; whole && later < ops.size(); ++later) {
        if (overlap(written(ops[later]), k) || overlap(written(ops[later]), v)) break;
        for (const View& view : reads(ops[later])) whole = whole && !overlap(view, k) && !overlap(view, v);
      }
      adds_up_[i + 1] = whole;
    }
  }
}

void CudaExecutable::place_values() {
  std::vector<int64_t> bytes;
  for (size_t v = 0; v < program_.values.size(); ++v)
    bytes.push_back(capacity(static_cast<ValueId>(v)) * program_.values[v].width * size_of(type_of(static_cast<ValueId>(v))));
  std::vector<LateRead> late;
  for (size_t i = 0; i + 1 < program_.ops.size(); ++i)
    if (const auto* linear = std::get_if<Linear>(&program_.ops[i]); linear && linear->residual)
      late.push_back({.value = linear->residual.value, .op = static_cast<int64_t>(i) + 1});
  const BufferPlan plan = plan_buffers(program_, bytes, kAlignment, late);
  offsets_ = plan.offset;
  arena_ = DeviceMemory(plan.bytes, "activations");
  // NaN: what nobody wrote must not go unseen.
  MAGA_CUDA(cudaMemsetAsync(arena_.data(), 0xff, static_cast<size_t>(arena_.bytes()), stream_.get()));
}

void CudaExecutable::allocate_scratch() {
  int64_t slabs = 0, gated = 0;
  for (const Op& op : program_.ops) {
    if (const auto* linear = std::get_if<Linear>(&op))
      slabs = std::max(slabs,
                       kRowTile * linear->out.width *
                           most_slabs(static_cast<int>(linear->out.width), static_cast<int>(linear->in.width), device_->compute));
    if (const auto* linear = std::get_if<GatedLinear>(&op)) gated = std::max(gated, linear->out.width);
  }
  slabs_ = DeviceMemory(slabs * static_cast<int64_t>(sizeof(float)), "partial sums");
  scratch_ = DeviceMemory(static_cast<int64_t>(linear_scratch_bytes(limits_.tokens, gated, device_->compute)), "scratch");
  for (const RopeTable& table : program_.rope_tables) {
    const int64_t pairs = table.rotary_dim / 2;
    inv_freqs_.emplace_back(pairs * static_cast<int64_t>(sizeof(float)), "rope tables");
    copy_in(inv_freqs_.back(), table.inv_freq);
    turns_.emplace_back(limits_.tokens * pairs * static_cast<int64_t>(sizeof(float2)), "rope angles");
  }
  for (const std::vector<float>& slopes : program_.alibi_slopes) {
    alibi_slopes_.emplace_back(static_cast<int64_t>(slopes.size() * sizeof(float)), "ALiBi slopes");
    copy_in(alibi_slopes_.back(), slopes);
  }
  const int draws = static_cast<int>(limits_.logit_rows);
  chosen_ = DeviceMemory(draws * static_cast<int64_t>(sizeof(int32_t)), "tokens");
  drawn_ = DeviceMemory(draws * static_cast<int64_t>(sizeof(Drawn)), "tokens");
  sample_scratch_ = DeviceMemory(static_cast<int64_t>(sample_scratch_bytes(draws)), "sampling");
  for (Slot& slot : slots_) slot.drawn = PinnedMemory(draws * static_cast<int64_t>(sizeof(Drawn)), "tokens");
}

int64_t CudaExecutable::most_page_ids() const {
  const int64_t longest =
      program_.max_positions > 0 ? (program_.max_positions + limits_.page_tokens - 1) / limits_.page_tokens + 1 : limits_.pages;
  return limits_.sequences * std::min(longest, limits_.pages);
}

void CudaExecutable::make_pages(int64_t pages) {
  limits_.pages = pages;
  pool_ = DeviceMemory(pages * page_bytes_, "K/V pages");
  staging_.reset();
  staging_.emplace(limits_, most_page_ids());
  plans_.clear();
  layer_offset_.clear();
  int64_t elements = 0;
  for (const CacheLayer& layer : program_.cache_layers) {
    layer_offset_.push_back(elements);
    elements += layer.kv_heads * (layer.head_dim + layer.v_dim) * limits_.page_tokens;
  }
  for (const Op& op : program_.ops)
    if (const auto* attention = std::get_if<Attention>(&op)) plan_of(*attention);
  MAGA_CUDA(cudaDeviceSynchronize());  // plans are cleared on another stream than they are used on
}

AttentionPlan& CudaExecutable::plan_of(const Attention& op) {
  const CacheLayer& layer = program_.cache_layers[op.layer];
  const AttentionShape shape{.heads = static_cast<int>(op.heads),
                             .kv_heads = static_cast<int>(op.kv_heads),
                             .head_dim = static_cast<int>(op.head_dim),
                             .v_dim = static_cast<int>(layer.v_dim),
                             .window = op.window,
                             .special_scores = op.soft_cap > 0 || op.alibi != kNone || op.sinks != kNone};
  for (const auto& plan : plans_)
    if (plan->shape() == shape) return *plan;
  plans_.push_back(std::make_unique<AttentionPlan>(shape, device_->compute, limits_.kv_dtype, static_cast<int>(limits_.page_tokens),
                                                   limits_.tokens, limits_.sequences, limits_.pages));
  return *plans_.back();
}

// Prompts of `budget` tokens together, in the first pages of the pool.
void CudaExecutable::warm_up(int64_t budget) {
  std::vector<int32_t> ids(budget), positions(budget), pages;
  const int64_t longest = program_.max_positions > 0 ? program_.max_positions : budget;
  std::vector<int32_t> starts{0}, lengths, page_starts{0}, rows;
  for (int64_t begin = 0; begin < budget && static_cast<int64_t>(lengths.size()) < limits_.sequences;) {
    const int64_t count = std::min(budget - begin, longest);
    for (int64_t i = 0; i < count; ++i) {
      ids[begin + i] = static_cast<int32_t>((begin + i) * 31 % program_.vocab);
      positions[begin + i] = static_cast<int32_t>(i);
    }
    for (int64_t p = 0; p < (count + limits_.page_tokens - 1) / limits_.page_tokens; ++p)
      pages.push_back(static_cast<int32_t>(pages.size()));
    begin += count;
    starts.push_back(static_cast<int32_t>(begin));
    lengths.push_back(static_cast<int32_t>(count));
    page_starts.push_back(static_cast<int32_t>(pages.size()));
    if (static_cast<int64_t>(rows.size()) < limits_.logit_rows) rows.push_back(static_cast<int32_t>(begin - 1));
  }
  const auto tokens = static_cast<size_t>(starts.back());
  run({.ids = std::span(ids).first(tokens),
       .positions = std::span(positions).first(tokens),
       .sequence_start = starts,
       .kv_length = lengths,
       .prompt_length = lengths,
       .page_start = page_starts,
       .pages = pages,
       .logit_rows = rows,
       .tree = {}});
}

int64_t CudaExecutable::pages_that_fit() const {
  size_t free = 0, total = 0;
  MAGA_CUDA(cudaMemGetInfo(&free, &total));
  const int64_t used = DeviceMemory::all_bytes() + kReserveBytes;
  const auto share = static_cast<int64_t>(device_->memory_utilization * static_cast<double>(device_->total_bytes));
  const int64_t room = std::min(share - used, static_cast<int64_t>(free) - kReserveBytes);
  const int64_t pages = room / page_bytes_;
  MAGA_REQUIRE(pages > 0, "no room is left for K/V pages: weights and buffers take ", used >> 20, " MiB of the GPU's ",
               device_->total_bytes >> 20, ", ", free >> 20, " MiB are free, and memory utilization is ",
               device_->memory_utilization);
  return std::min<int64_t>(pages, std::numeric_limits<int32_t>::max());
}

// --- steps ---

StepShape CudaExecutable::shape_of(const Step& step, int64_t draws) const {
  const auto rows = static_cast<int>(step.logit_rows.size());
  if (is_decode(step) && draws <= rows) {
    const int bucket = bucket_of(rows);
    if (bucket > 0 && bucket <= std::min({limits_.tokens, limits_.sequences, limits_.logit_rows}))
      return {.tokens = bucket, .sequences = bucket, .rows = bucket, .draws = bucket};
  }
  return {.tokens = static_cast<int>(step.tokens()),
          .sequences = static_cast<int>(step.sequences()),
          .rows = rows,
          .draws = static_cast<int>(draws),
          .tree = !step.tree.empty()};
}

void CudaExecutable::forward(const DeviceStep& step, const Step* host) {
  step_ = step;
  step_.chosen = chosen_.as<int32_t>();
  pending_.reset();
  for (size_t i = 0; i < program_.rope_tables.size(); ++i) {
    const RopeTable& table = program_.rope_tables[i];
    rope_turns(queue_, step_,
               {.inv_freq = inv_freqs_[i].as<float>(),
                .rotary_dim = static_cast<int>(table.rotary_dim),
                .multiplier = table.multiplier,
                .theta = table.theta,
                .dynamic_factor = table.dynamic_factor,
                .max_positions = table.max_positions,
                .turns = turns_[i].as<float2>()});
  }
  for (const auto& plan : plans_) plan->plan(queue_, step_, host);
  for (size_t i = 0; i < program_.ops.size(); ++i) {
    if (pending_ && !adds_up_[i]) add_up_pending();
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
                     .tree = {}};
  for (const int bucket : kBuckets) {
    if (bucket > std::min({limits_.tokens, limits_.sequences, limits_.logit_rows})) break;
    const StepShape shape{.tokens = bucket, .sequences = bucket, .rows = bucket, .draws = bucket};
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
    MAGA_CHECK(program_.logits != kNone, "the program has no logits to draw from");
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
  check_step(step, limits_, page_bytes_ > 0, program_.vocab, earlier);
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
  check_step(step, limits_, page_bytes_ > 0, program_.vocab);
  const StepShape shape{.tokens = static_cast<int>(step.tokens()),
                        .sequences = static_cast<int>(step.sequences()),
                        .rows = static_cast<int>(step.logit_rows.size()),
                        .draws = 0,
                        .tree = !step.tree.empty()};
  staging_->stage(queue_, 0, shape, step, {}, page_bytes_ > 0);
  forward(staging_->step(shape), &step);
  MAGA_CUDA(cudaStreamSynchronize(stream_.get()));
  logit_rows_ = static_cast<int64_t>(step.logit_rows.size());
}

std::span<const float> CudaExecutable::logits() {
  use_device(device_->id);
  MAGA_CHECK(program_.logits != kNone, "the program has no logits");
  const int64_t bytes = logit_rows_ * program_.vocab * static_cast<int64_t>(sizeof(float));
  if (logits_.bytes() < bytes) logits_ = PinnedMemory(bytes, "logits");
  MAGA_CUDA(cudaMemcpyAsync(logits_.data(), arena_.data() + offsets_[program_.logits], static_cast<size_t>(bytes),
                            cudaMemcpyDeviceToHost, stream_.get()));
  MAGA_CUDA(cudaStreamSynchronize(stream_.get()));
  return {logits_.as<const float>(), static_cast<size_t>(logit_rows_ * program_.vocab)};
}

void CudaExecutable::copy_page(int32_t from, int32_t to) {
  use_device(device_->id);
  MAGA_CHECK(from >= 0 && from < limits_.pages && to >= 0 && to < limits_.pages, "page ", from, " to page ", to, " of ",
             limits_.pages);
  if (from == to) return;
  MAGA_CUDA(cudaMemcpyAsync(pool_.data() + to * page_bytes_, pool_.data() + from * page_bytes_, static_cast<size_t>(page_bytes_),
                            cudaMemcpyDeviceToDevice, stream_.get()));
}

// --- values ---

// On the stream of the kernels that will read it: a copy on another one may still be under way when it returns.
void CudaExecutable::copy_in(const DeviceMemory& to, std::span<const float> from) {
  MAGA_CUDA(cudaMemcpyAsync(to.data(), from.data(), from.size_bytes(), cudaMemcpyHostToDevice, stream_.get()));
}

int64_t CudaExecutable::capacity(ValueId value) const {
  return round_up(program_.values[value].rows == Rows::tokens ? limits_.tokens : limits_.logit_rows, kRowTile);
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

int64_t CudaExecutable::buffer_bytes() const {
  int64_t bytes = arena_.bytes() + slabs_.bytes() + scratch_.bytes() + sample_scratch_.bytes() + staging_->bytes();
  for (const DeviceMemory& memory : turns_) bytes += memory.bytes();
  return bytes;
}

}  // namespace maga::cuda
