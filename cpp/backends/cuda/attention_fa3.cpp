#include "backends/cuda/attention_fa3.h"

#include <algorithm>
#include <queue>

#include "backends/cuda/cuda_check.h"

namespace maga::cuda {
namespace {

constexpr int kArrays = 6;      // of Fa3Call, one entry an item
constexpr int kTileCost = 256;  // of starting a tile, in keys

// Rows of 2-byte elements whose pieces of 16 bytes the copy engine can fetch.
bool copyable(const void* rows, int64_t stride) { return reinterpret_cast<uintptr_t>(rows) % 16 == 0 && stride % 8 == 0; }

}  // namespace

Fa3Plan::Fa3Plan(const Fa3Kernel& kernel, const AttentionShape& shape, int64_t tokens) : kernel_(kernel), shape_(shape) {
  int device = 0;
  MAGA_CUDA(cudaGetDevice(&device));
  MAGA_CUDA(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, device));
  work_.resize(sms_);
  most_items_ = (tokens / kernel.tile + tokens / kFa3Tokens + 1) * shape.heads;  // the last tile of each sequence may be part empty
  const int64_t bytes = (kArrays * most_items_ + 2 * (sms_ + 1)) * static_cast<int64_t>(sizeof(int32_t));
  memory_ = DeviceMemory(bytes, "the schedule of attention");
  for (Staging& s : staging_) s.memory = PinnedMemory(bytes, "the schedule of attention");
}

void Fa3Plan::plan(const Queue& queue, const Step& host, int first_sequence) {
  std::vector<int> fresh, continued;
  for (int i = first_sequence; i < host.sequences(); ++i)
    (host.kv_length[i] == host.sequence_start[i + 1] - host.sequence_start[i] ? fresh : continued).push_back(i);
  Staging& staging = staging_[turn_];
  turn_ ^= 1;
  MAGA_CUDA(cudaEventSynchronize(staging.copied.get()));
  int32_t* const staged = staging.memory.as<int32_t>();
  fresh_ = schedule(host, fresh, staged, 0);
  continued_ = schedule(host, continued, staged, sms_ + 1 + kArrays * fresh_.items);
  MAGA_CUDA(cudaMemcpyAsync(memory_.data(), staged, (continued_.offset + sms_ + 1 + kArrays * continued_.items) * sizeof(int32_t),
                            cudaMemcpyHostToDevice, queue.stream));
  MAGA_CUDA(cudaEventRecord(staging.copied.get(), queue.stream));
}

Fa3Plan::Schedule Fa3Plan::schedule(const Step& host, std::vector<int>& sequences, int32_t* staged, int64_t offset) {
  for (auto& items : work_) items.clear();
  std::stable_sort(sequences.begin(), sequences.end(), [&](int a, int b) { return host.kv_length[a] > host.kv_length[b]; });
  using Load = std::pair<int64_t, int>;  // keys, CTA
  std::priority_queue<Load, std::vector<Load>, std::greater<>> loads;
  for (int cta = 0; cta < sms_; ++cta) loads.push({0, cta});
  const int group = shape_.heads / shape_.kv_heads;
  int64_t count = 0;
  // K/V head by K/V head, so that the CTAs share its keys in L2.
  for (int kv_head = 0; kv_head < shape_.kv_heads; ++kv_head)
    for (const int sequence : sequences) {
      const int tokens = host.sequence_start[sequence + 1] - host.sequence_start[sequence];
      for (int tile = (tokens - 1) / kernel_.tile; tile >= 0; --tile)
        for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
          const auto [load, cta] = loads.top();
          loads.pop();
          const int keys = host.kv_length[sequence] - tokens + std::min(tokens, (tile + 1) * kernel_.tile);
          loads.push({load + keys + kTileCost, cta});
          work_[cta].push_back({tile, head, sequence});
          ++count;
        }
    }
  MAGA_CHECK(offset + kArrays * count <= kArrays * most_items_ + sms_ + 1, count, " items of work, planned for ", most_items_);

  int32_t* const start = staged + offset;
  int32_t* const arrays = start + sms_ + 1;
  int64_t at = 0;
  for (int cta = 0; cta < sms_; ++cta) {
    start[cta] = static_cast<int32_t>(at);
    for (const Item& item : work_[cta]) {
      const int first = host.sequence_start[item.sequence];
      const int32_t values[kArrays] = {item.tile,
                                       item.head,
                                       first,
                                       host.page_start[item.sequence],
                                       host.sequence_start[item.sequence + 1] - first,
                                       host.kv_length[item.sequence]};
      for (int i = 0; i < kArrays; ++i) arrays[i * count + at] = values[i];
      ++at;
    }
  }
  start[sms_] = static_cast<int32_t>(at);
  return {.items = count, .offset = offset};
}

void Fa3Plan::run(const Queue& queue, const DeviceStep& step, const AttentionArgs& args) const {
  MAGA_CHECK(copyable(args.q, args.q_stride), "queries are copied in pieces of 16 bytes");
  MAGA_CHECK(args.soft_cap == 0 && args.alibi_slopes == nullptr && args.sinks == nullptr, "FlashAttention-3 has none of these");
  const bool own_keys = args.k != nullptr && copyable(args.k, args.k_stride) && copyable(args.v, args.v_stride);
  MAGA_CHECK(args.layer.k_scales == nullptr || ((own_keys || fresh_.items == 0) && continued_.items == 0),
             "FlashAttention-3 reads no pages of codes");
  if (fresh_.items > 0) launch(queue, step, args, fresh_, own_keys);
  if (continued_.items > 0) launch(queue, step, args, continued_, false);
}

void Fa3Plan::launch(const Queue& queue, const DeviceStep& step, const AttentionArgs& args, const Schedule& schedule,
                     bool fresh) const {
  const int32_t* start = memory_.as<int32_t>() + schedule.offset;
  const int32_t* arrays = start + sms_ + 1;
  Fa3Call call{.q = args.q,
               .out = args.out,
               .q_stride = args.q_stride,
               .out_stride = args.out_stride,
               .tokens = step.tokens,
               .heads = shape_.heads,
               .kv_heads = shape_.kv_heads,
               .scale = args.scale,
               .work_start = start,
               .tile = arrays,
               .head = arrays + schedule.items,
               .first_token = arrays + 2 * schedule.items,
               .first_page = arrays + 3 * schedule.items,
               .q_length = arrays + 4 * schedule.items,
               .kv_length = arrays + 5 * schedule.items};
  if (fresh) {
    call.k = args.k, call.v = args.v;
    call.k_stride = args.k_stride, call.v_stride = args.v_stride;
  } else {
    call.k = args.layer.k, call.v = args.layer.v;
    call.page_stride = args.layer.page_stride, call.head_stride = args.layer.k_head_stride;
    call.page_tokens = args.layer.page_tokens, call.pages = step.pages;
  }
  MAGA_CUDA((fresh ? kernel_.fresh : kernel_.paged)(call, queue.stream));
}

std::unique_ptr<Fa3Plan> make_fa3_plan(const AttentionShape& shape, DType type, int64_t tokens) {
  // FlashInfer 0.6.6 takes the values of the first block of keys for those of the first block in a window.
  if (shape.window > 0 || shape.head_dim != shape.v_dim) return nullptr;
  int device = 0, major = 0;
  MAGA_CUDA(cudaGetDevice(&device));
  MAGA_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  if (major != 9) return nullptr;
#ifdef MAGA_FLASHINFER
#define MAGA_CASE(d, t) \
  if (shape.head_dim == d && type == DType::t) return std::make_unique<Fa3Plan>(attention_fa3_hd##d##_##t(), shape, tokens);
  MAGA_FA3_KERNELS(MAGA_CASE)
#undef MAGA_CASE
#endif
  return nullptr;
}

}  // namespace maga::cuda
