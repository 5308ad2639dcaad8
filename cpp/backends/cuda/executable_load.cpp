// Loading: which ops add up partial sums, where values and pages lie, how many pages fit.
#include <algorithm>
#include <bit>
#include <limits>
#include <map>
#include <tuple>

#include "backends/cuda/cuda_check.h"
#include "backends/cuda/executable.h"
#include "backends/cuda/linear_affine.h"
#include "backends/cuda/sample.h"
#include "program/access.h"
#include "program/buffers.h"

namespace maga::cuda {
namespace {

constexpr int64_t kAlignment = 256;
// Kernels for few tokens read their rows in tiles of up to this many.
constexpr int64_t kRowTile = 64;
// For graphs, the driver, cuBLASLt and fragments: what nobody here counts.
constexpr int64_t kReserveBytes = int64_t{512} << 20;

int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

}  // namespace

CudaExecutable::CudaExecutable(std::shared_ptr<Device> device, Program program, std::vector<std::shared_ptr<const Weight>> weights,
                               const Limits& limits)
    : device_(std::move(device)),
      program_(std::move(program)),
      weights_(std::move(weights)),
      limits_(limits),
      bounds_(program_),
      queue_{.stream = stream_.get(), .overlap = device_->capability >= 90},
      page_bytes_(maga::page_bytes(program_, limits)) {
  MAGA_REQUIRE(limits_.page_tokens >= 16 && (limits_.page_tokens & (limits_.page_tokens - 1)) == 0, "K/V pages of ",
               limits_.page_tokens, " tokens: the CUDA backend takes powers of two from 16 on");
  check_weights();
  find_routers();
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

void CudaExecutable::check_weights() {
  MAGA_CHECK(weights_.size() == program_.weights.size(), weights_.size(), " weights for a program of ", program_.weights.size());
  for (size_t i = 0; i < weights_.size(); ++i) {
    const auto* packed = dynamic_cast<const DeviceWeight*>(weights_[i].get());
    MAGA_CHECK(packed && packed->type() == device_->compute, program_.weights[i].name, " was not packed by this CUDA backend");
    MAGA_CHECK(packed->shape() == program_.weights[i].shape, program_.weights[i].name, " is packed in another shape");
  }
  for (const Op& op : program_.ops) {
    if (const auto* positions = std::get_if<AddPositions>(&op)) make_dense(positions->table);
    if (const auto* heads = std::get_if<HeadLinear>(&op)) make_dense(heads->weight);
    if (const auto* embed = std::get_if<Embed>(&op)) {
      make_dense(embed->virtual_table);
      MAGA_REQUIRE(weight(embed->table).layout().form != WeightForm::fp8, program_.weights[embed->table].name,
                   " is of fp8: the CUDA backend takes that of linears");
    }
  }
}

// Of weights that are small, and seldom quantised.
void CudaExecutable::make_dense(WeightId id) {
  if (id == kNone || weight(id).layout().form == WeightForm::dense) return;
  MAGA_REQUIRE(weight(id).layout().form == WeightForm::affine, program_.weights[id].name,
               " is of fp8: the CUDA backend takes that of linears");
  const std::vector<int64_t>& shape = weight(id).shape();
  const int64_t cols = shape.back(), rows = shape[0] * (shape.size() == 3 ? shape[1] : 1);
  DeviceMemory memory(rows * cols * size_of(device_->compute), "weights");
  affine_unpack(queue_, device_->compute, weight(id).layout().affine, data(id), 0, rows, cols, memory.data());
  MAGA_CUDA(cudaStreamSynchronize(stream_.get()));
  weights_[id] = std::make_shared<DeviceWeight>(shape, device_->compute, WeightLayout{}, std::move(memory),
                                                shape.size() == 3 ? "a matrix for each head" : "a table of positions");
}

void CudaExecutable::find_routers() {
  wide_.assign(program_.values.size(), false);
  for (const Op& op : program_.ops)
    if (const auto* moe = std::get_if<Moe>(&op)) wide_[moe->logits.value] = true;
  for (const Op& op : program_.ops) {
    const bool takes = std::holds_alternative<Linear>(op);
    MAGA_REQUIRE(takes || !wide_[written(op).value], "only linears can write a router's logits on the CUDA backend");
    for (const View& view : reads(op)) {
      const auto* moe = std::get_if<Moe>(&op);
      MAGA_REQUIRE(!wide_[view.value] || (moe && view == moe->logits),
                   "only experts can read a router's logits on the CUDA backend");
    }
  }
  if (program_.logits != kNone) wide_[program_.logits] = true;
}

// Finds the ops that can add up a linear's slabs: the norm of its result, or the PrepareQkv of its q, k and v.
void CudaExecutable::plan_lowering() {
  const auto& ops = program_.ops;
  adds_up_.assign(ops.size() + 1, false);
  const auto kept = [&](ValueId value) {
    return value == program_.logits || std::count(program_.outputs.begin(), program_.outputs.end(), value) > 0;
  };
  const auto takes_rounded = [&](const Op& op, const View& x) {
    const auto of_codes = [&](const auto& linear) {
      return linear.in == x && weight(linear.weight).layout().form == WeightForm::fp8;
    };
    if (const auto* linear = std::get_if<Linear>(&op)) return of_codes(*linear);
    const auto* linear = std::get_if<GatedLinear>(&op);
    return linear && of_codes(*linear);
  };
  rounds_.assign(ops.size(), false);
  for (size_t i = 0; i + 1 < ops.size(); ++i) {
    if (const auto* norm = std::get_if<Norm>(&ops[i])) rounds_[i] = takes_rounded(ops[i + 1], norm->out);
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
  std::vector<const PrepareQkv*> prepared(program_.cache_layers.size());
  for (size_t i = 0; i < program_.ops.size(); ++i) {
    const auto op = static_cast<int64_t>(i);
    const auto* linear = std::get_if<Linear>(&program_.ops[i]);
    if (linear && linear->residual && i + 1 < program_.ops.size())  // by the op that adds up its slabs
      late.push_back({.value = linear->residual.value, .op = op + 1});
    if (const auto* prepare = std::get_if<PrepareQkv>(&program_.ops[i])) prepared[prepare->layer] = prepare;
    const auto* attention = std::get_if<Attention>(&program_.ops[i]);
    if (attention && prepared[attention->layer])  // see OwnKeys
      for (const View& view : {prepared[attention->layer]->k, prepared[attention->layer]->v})
        late.push_back({.value = view.value, .op = op});
  }
  const BufferPlan plan = plan_buffers(program_, bytes, kAlignment, late);
  offsets_ = plan.offset;
  arena_ = DeviceMemory(plan.bytes, "activations");
  // NaN: what nobody wrote must not go unseen.
  MAGA_CUDA(cudaMemsetAsync(arena_.data(), 0xff, static_cast<size_t>(arena_.bytes()), stream_.get()));
}

void CudaExecutable::allocate_scratch() {
  int64_t slabs = 0, gated = 0;
  bool widens = false;
  std::vector<const Moe*> experts;
  std::map<std::tuple<int64_t, int64_t, WeightLayout>, int64_t> slab_rows;  // by (out, in, form): most layers are alike
  for (const Op& op : program_.ops) {
    if (const auto* linear = std::get_if<Linear>(&op)) {
      const int64_t n = linear->out.width, k = linear->in.width;
      const WeightLayout& layout = weight(linear->weight).layout();
      const auto [known, is_new] = slab_rows.try_emplace({n, k, layout});
      if (is_new)
        known->second = most_slab_rows(limits_.tokens, static_cast<int>(n), static_cast<int>(k), device_->compute, layout);
      slabs = std::max(slabs, n * known->second);
      widens = widens || layout.form != WeightForm::dense;
    }
    if (const auto* linear = std::get_if<GatedLinear>(&op)) {
      gated = std::max(gated, linear->out.width);
      widens = widens || weight(linear->weight).layout().form != WeightForm::dense;
    }
    if (const auto* moe = std::get_if<Moe>(&op)) experts.push_back(moe);
  }
  if (!experts.empty()) experts_.emplace(experts, std::max(limits_.tokens, limits_.logit_rows), device_->compute, stream_.get());
  slabs_ = DeviceMemory(slabs * static_cast<int64_t>(sizeof(float)), "partial sums");
  scratch_ = DeviceMemory(static_cast<int64_t>(linear_scratch_bytes(limits_.tokens, gated, device_->compute)), "scratch");
  if (widens) widened_ = DeviceMemory(kWidenedBytes, "scratch");
  for (const RopeTable& table : program_.rope_tables) {
    const int64_t pairs = table.rotary_dim / 2;
    std::vector<float> frequencies = table.inv_freq;
    frequencies.insert(frequencies.end(), table.long_inv_freq.begin(), table.long_inv_freq.end());
    inv_freqs_.emplace_back(static_cast<int64_t>(frequencies.size() * sizeof(float)), "rope tables");
    copy_in(inv_freqs_.back(), frequencies);
    turns_.emplace_back(limits_.tokens * pairs * static_cast<int64_t>(sizeof(float2)), "rope angles");
  }
  const auto copy_tables = [&](const std::vector<std::vector<float>>& tables, std::vector<DeviceMemory>& to) {
    for (const std::vector<float>& table : tables) {
      to.emplace_back(static_cast<int64_t>(table.size() * sizeof(float)), "tables");
      copy_in(to.back(), table);
    }
  };
  copy_tables(program_.alibi_slopes, alibi_slopes_);
  copy_tables(program_.corrections, corrections_);
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
  int64_t offset = 0;
  for (size_t i = 0; i < program_.cache_layers.size(); ++i) {
    layer_offset_.push_back(offset);
    offset += program_.cache_layers[i].entry_bytes(limits_.kv_dtype(static_cast<int64_t>(i))) * limits_.page_tokens;
  }
  layer_plans_.assign(program_.cache_layers.size(), nullptr);
  for (const Op& op : program_.ops)
    if (const auto* attention = std::get_if<Attention>(&op)) layer_plans_[attention->layer] = &plan_of(*attention);
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
  const DType kv_type = limits_.kv_dtype(op.layer);
  for (const auto& plan : plans_)
    if (plan->shape() == shape && plan->kv_type() == kv_type) return *plan;
  plans_.push_back(std::make_unique<AttentionPlan>(shape, device_->compute, kv_type, static_cast<int>(limits_.page_tokens),
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
       .tree = {},
       .context = {},
       .block_positions = std::span(positions).first(tokens)});
}

int64_t CudaExecutable::pages_that_fit() const {
  size_t free = 0, total = 0;
  MAGA_CUDA(cudaMemGetInfo(&free, &total));
  const int64_t used = all_device_bytes() + kReserveBytes;
  const auto share = static_cast<int64_t>(device_->memory_utilization * static_cast<double>(device_->total_bytes));
  const int64_t room = std::min(share - used, static_cast<int64_t>(free) - kReserveBytes);
  const int64_t pages = room / page_bytes_;
  MAGA_REQUIRE(pages > 0, "no room is left for K/V pages: weights and buffers take ", used >> 20, " MiB of the GPU's ",
               device_->total_bytes >> 20, ", ", free >> 20, " MiB are free, and memory utilization is ",
               device_->memory_utilization);
  return std::min<int64_t>(pages, std::numeric_limits<int32_t>::max());
}

int64_t CudaExecutable::capacity(ValueId value) const {
  return round_up(program_.values[value].rows == Rows::tokens ? limits_.tokens : limits_.logit_rows, kRowTile);
}

int64_t CudaExecutable::buffer_bytes() const {
  int64_t bytes =
      arena_.bytes() + slabs_.bytes() + scratch_.bytes() + widened_.bytes() + sample_scratch_.bytes() + staging_->bytes();
  if (experts_) bytes += experts_->bytes();
  for (const DeviceMemory& memory : turns_) bytes += memory.bytes();
  return bytes;
}

}  // namespace maga::cuda
