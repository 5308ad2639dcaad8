#include "backends/cuda/attention.h"

#include <algorithm>
#include <bit>

#include "backends/cuda/attention_fa3.h"
#include "backends/cuda/attention_generic.h"
#include "backends/cuda/attention_mma.h"
#include "backends/cuda/attention_plan.h"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/memory.h"

namespace maga::cuda {
namespace {

// Hands out parts of one allocation; with base 0 it only counts.
struct Carver {
  uintptr_t base = 0;
  size_t used = 0;
  template <typename T>
  T* take(size_t count) {
    used = (used + 255) / 256 * 256;
    T* at = reinterpret_cast<T*>(base + used);
    used += count * sizeof(T);
    return at;
  }
};

// How one kernel is launched on this device, and its work list.
struct Lane {
  MmaKernel kernel;
  int stages = 0, shared_bytes = 0, ctas = 0;
  WorkList work;
};

Lane make_lane(const MmaKernel& kernel, const cudaDeviceProp& device) {
  Lane lane{.kernel = kernel};
  const auto bytes = [&](int stages) { return stages * kernel.stage_bytes + kernel.scratch_bytes; };
  // CTAs of an SM hide each other's waits: as many as the kernel is made for, if two of them can keep two blocks under way, more of
  // them one; else one CTA with all the memory.
  const auto fits = [&](int ctas, int stages) {
    return bytes(stages) <= static_cast<int>(device.sharedMemPerBlockOptin) &&
           ctas * (bytes(stages) + static_cast<int>(device.reservedSharedMemPerBlock)) <=
               static_cast<int>(device.sharedMemPerMultiprocessor);
  };
  for (int ctas = std::max(kernel.ctas, 2); ctas > 0; --ctas)
    for (int stages = 4; stages >= (ctas == 2 ? 3 : 2); --stages)
      if (lane.stages == 0 && fits(ctas, stages)) lane.stages = stages;
  if (lane.stages == 0) return {};
  lane.shared_bytes = bytes(lane.stages);
  MAGA_CUDA(cudaFuncSetAttribute(kernel.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, lane.shared_bytes));
  int an_sm = 0;
  MAGA_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&an_sm, kernel.kernel, kernel.threads, lane.shared_bytes));
  lane.ctas = std::max(1, an_sm) * device.multiProcessorCount;
  return lane;
}

void carve(Carver& carver, Lane& lane, int64_t sequences) {
  lane.work = {.sequences = carver.take<WorkSequence>(sequences),
               .starts = carver.take<WorkStart>(lane.ctas),
               .before = carver.take<int>(sequences),
               .ctas = lane.ctas,
               .rows = lane.kernel.rows,
               .block_keys = lane.kernel.block_keys};
}

}  // namespace

struct AttentionPlan::State {
  AttentionShape shape;
  DType type, kv_type;
  int page_tokens;
  Lane few, many;  // none: the generic kernel
  float* partial_out = nullptr;
  float2* partial_sums = nullptr;
  int* arrived = nullptr;
  DeviceMemory memory;
  std::unique_ptr<Fa3Plan> fa3;  // null: not here

  // Of the planned step.
  bool run_few = false, run_many = false, zero_rest = false;
  bool fa3_run = false;
  int64_t tokens = 0;  // that are no padding; known unless the plan is captured

  void allocate(int64_t sequences);
  bool generic() const { return few.ctas == 0 || many.ctas == 0; }
  MmaArgs mma_args(const DeviceStep& step, const AttentionArgs& args, const Lane& lane) const;
};

void AttentionPlan::State::allocate(int64_t sequences) {
  const size_t most_ctas = std::max(few.ctas, many.ctas);
  const auto layout = [&](Carver carver) {
    carve(carver, few, sequences);
    carve(carver, many, sequences);
    // The two kernels run one after the other and share this.
    const size_t rows = 2 * std::max(few.ctas * few.kernel.rows, many.ctas * many.kernel.rows);
    partial_out = carver.take<float>(rows * shape.head_dim);
    partial_sums = carver.take<float2>(rows);
    arrived = carver.take<int>(most_ctas);
    return carver.used;
  };
  memory = DeviceMemory(static_cast<int64_t>(layout({})), "the work lists of attention");
  layout({.base = reinterpret_cast<uintptr_t>(memory.data())});
  MAGA_CUDA(cudaMemset(arrived, 0, most_ctas * sizeof(int)));
  MAGA_CUDA(cudaStreamSynchronize(nullptr));  // the queue's stream may not wait for this one
}

AttentionPlan::AttentionPlan(const AttentionShape& shape, DType type, DType kv_type, int page_tokens, int64_t tokens,
                             int64_t sequences, int64_t pages)
    : state_(new State{.shape = shape, .type = type, .kv_type = kv_type, .page_tokens = page_tokens}) {
  std::unique_ptr<State> state(state_);  // until all is there
  MAGA_CHECK(shape.kv_heads > 0 && shape.heads % shape.kv_heads == 0, shape.heads, " heads over ", shape.kv_heads);
  MAGA_CHECK(page_tokens >= 16 && std::has_single_bit(static_cast<unsigned>(page_tokens)), "pages of ", page_tokens, " tokens");
  MAGA_CHECK(shape.head_dim <= kGenericHeadDim && shape.v_dim <= kGenericHeadDim, "head sizes ", shape.head_dim, ", ", shape.v_dim);
  int current = 0;
  cudaDeviceProp device{};
  MAGA_CUDA(cudaGetDevice(&current));
  MAGA_CUDA(cudaGetDeviceProperties(&device, current));
  const MmaKernels kernels = attention_mma(type, kv_type, shape.head_dim);
  if (device.major >= 8 && shape.v_dim == shape.head_dim && kernels.few.kernel != nullptr) {
    const bool some = shape.heads / shape.kv_heads > kernels.few.rows && kernels.some.kernel != nullptr;
    state->few = make_lane(some ? kernels.some : kernels.few, device);
    state->many = make_lane(kernels.many, device);
  }
  if (!state->generic()) {
    state->allocate(sequences);
    if (!shape.special_scores) state->fa3 = make_fa3_plan(shape, type, tokens);
  }
  state.release();
}

AttentionPlan::~AttentionPlan() { delete state_; }

const AttentionShape& AttentionPlan::shape() const { return state_->shape; }

DType AttentionPlan::kv_type() const { return state_->kv_type; }

bool AttentionPlan::wants_own_keys() const { return state_->fa3_run && state_->fa3->has_fresh(); }

bool AttentionPlan::needs_own_keys() const { return wants_own_keys() && is_code(state_->kv_type); }

void AttentionPlan::plan(const Queue& queue, const DeviceStep& step, const Step* host) {
  State& s = *state_;
  if (s.generic()) return;
  const int group = s.shape.heads / s.shape.kv_heads;
  int own = step.sequences;  // sequences below this one go to our kernels, the rest to FlashAttention-3
  s.run_few = s.run_many = s.fa3_run = false;
  s.zero_rest = host == nullptr || step.tokens > host->tokens();
  if (host == nullptr) {
    (group <= s.few.kernel.rows ? s.run_few : s.run_many) = true;
  } else {
    s.tokens = host->tokens();
    own = static_cast<int>(host->sequences());
    const auto tokens = [&](int i) { return host->sequence_start[i + 1] - host->sequence_start[i]; };
    const auto suits_fa3 = [&](int i) {
      return tokens(i) >= kFa3Tokens && (!is_code(s.kv_type) || tokens(i) == host->kv_length[i]);
    };
    if (s.fa3 != nullptr && step.tree_mask == nullptr && step.context == nullptr)
      while (own > 0 && suits_fa3(own - 1)) --own;
    s.fa3_run = own < host->sequences();
    if (s.fa3_run) s.fa3->plan(queue, *host, own);
    for (int i = 0; i < own; ++i)
      if (tokens(i) > 0) (tokens(i) * group <= s.few.kernel.rows ? s.run_few : s.run_many) = true;
  }
  if (!s.run_few && !s.run_many) return;
  PlanArgs args{.shape = {group, s.shape.kv_heads, static_cast<int>(s.shape.window), step.tree_mask != nullptr},
                .few = s.few.work,
                .many = s.many.work,
                .sequences = own};
  if (!s.run_few) args.few.ctas = 0;
  if (!s.run_many) args.many.ctas = 0;
  attention_plan(queue, step, args);
}

MmaArgs AttentionPlan::State::mma_args(const DeviceStep& step, const AttentionArgs& args, const Lane& lane) const {
  MAGA_CHECK(args.layer.k_head_stride == args.layer.v_head_stride && args.layer.page_tokens == page_tokens, "K/V layout");
  return {.q = args.q,
          .out = args.out,
          .k = args.layer.k,
          .v = args.layer.v,
          .k_scales = args.layer.k_scales,
          .v_scales = args.layer.v_scales,
          .scale_stride = args.layer.scale_stride,
          .bf16 = type == DType::bf16,
          .q_stride = args.q_stride,
          .out_stride = args.out_stride,
          .page_stride = args.layer.page_stride,
          .head_stride = args.layer.k_head_stride,
          .page_shift = std::countr_zero(static_cast<unsigned>(page_tokens)),
          .scale = args.scale,
          .soft_cap = args.soft_cap,
          .alibi_slopes = args.alibi_slopes,
          .sinks = args.sinks,
          .tree_mask = step.tree_mask,
          .pages = step.pages,
          .token_count = step.sequence_start + step.sequences,
          .shape = {shape.heads / shape.kv_heads, shape.kv_heads, static_cast<int>(shape.window), step.tree_mask != nullptr},
          .work = lane.work,
          .partial_out = partial_out,
          .partial_sums = partial_sums,
          .arrived = arrived,
          .stages = lane.stages,
          .early = args.after_prepare};
}

void AttentionPlan::run(const Queue& queue, const DeviceStep& step, const AttentionArgs& args) {
  const State& s = *state_;
  if (s.generic()) return attention_generic(queue, step, {s.shape, s.type, s.kv_type, args});
  const Lane* lanes[] = {s.run_few ? &s.few : nullptr, s.run_many ? &s.many : nullptr};
  bool zero_rest = s.zero_rest;
  for (const Lane* lane : lanes) {
    if (lane == nullptr) continue;
    MmaArgs mma = s.mma_args(step, args, *lane);
    if (zero_rest) mma.zero_to = step.tokens;
    zero_rest = false;
    launch(queue, lane->kernel.kernel, lane->ctas, lane->kernel.threads, lane->shared_bytes, mma);
  }
  if (s.fa3_run) s.fa3->run(queue, step, args);
  if (zero_rest) {
    const int64_t size = size_of(s.type);
    MAGA_CUDA(cudaMemset2DAsync(static_cast<char*>(args.out) + s.tokens * args.out_stride * size, args.out_stride * size, 0,
                                s.shape.heads * s.shape.v_dim * size, step.tokens - s.tokens, queue.stream));
  }
}

}  // namespace maga::cuda
