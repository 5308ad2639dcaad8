#include "backends/cuda/attention_fa3.h"

#include <algorithm>
#include <numeric>
#include <queue>

#include "backends/cuda/cuda_check.h"

namespace maga::cuda {
namespace {

constexpr int kArrays = 6;      // of Fa3Call, one entry an item
constexpr int kTileCost = 256;  // of starting a tile, in keys

}  // namespace

Fa3Plan::Fa3Plan(const Fa3Kernel& kernel, const AttentionShape& shape, int64_t tokens) : kernel_(kernel), shape_(shape) {
  int device = 0;
  MAGA_CUDA(cudaGetDevice(&device));
  MAGA_CUDA(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, device));
  work_.resize(sms_);
  most_items_ = (tokens / kernel.tile + tokens / kFa3Tokens + 1) * shape.heads;  // the last tile of each sequence may be part empty
  const int64_t bytes = (kArrays * most_items_ + sms_ + 1) * static_cast<int64_t>(sizeof(int32_t));
  memory_ = DeviceMemory(bytes, "the schedule of attention");
  for (Staging& s : staging_) s.memory = PinnedMemory(bytes, "the schedule of attention");
}

void Fa3Plan::plan(const Queue& queue, const Step& host, int first_sequence) {
  for (auto& items : work_) items.clear();
  std::vector<int> order(host.sequences() - first_sequence);
  std::iota(order.begin(), order.end(), first_sequence);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return host.kv_length[a] > host.kv_length[b]; });
  using Load = std::pair<int64_t, int>;  // keys, CTA
  std::priority_queue<Load, std::vector<Load>, std::greater<>> loads;
  for (int cta = 0; cta < sms_; ++cta) loads.push({0, cta});
  const int group = shape_.heads / shape_.kv_heads;
  items_ = 0;
  // K/V head by K/V head, so that the CTAs share its keys in L2.
  for (int kv_head = 0; kv_head < shape_.kv_heads; ++kv_head)
    for (const int sequence : order) {
      const int tokens = host.sequence_start[sequence + 1] - host.sequence_start[sequence];
      for (int tile = (tokens - 1) / kernel_.tile; tile >= 0; --tile)
        for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
          const auto [load, cta] = loads.top();
          loads.pop();
          const int keys = host.kv_length[sequence] - tokens + std::min(tokens, (tile + 1) * kernel_.tile);
          loads.push({load + keys + kTileCost, cta});
          work_[cta].push_back({tile, head, sequence});
          ++items_;
        }
    }
  MAGA_CHECK(items_ <= most_items_, items_, " items of work, planned for ", most_items_);

  Staging& staging = staging_[turn_];
  turn_ ^= 1;
  MAGA_CUDA(cudaEventSynchronize(staging.copied.get()));
  int32_t* start = staging.memory.as<int32_t>();
  int32_t* arrays = start + sms_ + 1;
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
      for (int i = 0; i < kArrays; ++i) arrays[i * items_ + at] = values[i];
      ++at;
    }
  }
  start[sms_] = static_cast<int32_t>(at);
  MAGA_CUDA(cudaMemcpyAsync(memory_.data(), start, (sms_ + 1 + kArrays * items_) * sizeof(int32_t), cudaMemcpyHostToDevice,
                            queue.stream));
  MAGA_CUDA(cudaEventRecord(staging.copied.get(), queue.stream));
}

void Fa3Plan::run(const Queue& queue, const DeviceStep& step, const AttentionArgs& args) const {
  MAGA_CHECK(reinterpret_cast<uintptr_t>(args.q) % 16 == 0 && args.q_stride % 8 == 0, "queries are copied in pieces of 16 bytes");
  MAGA_CHECK(args.soft_cap == 0 && args.alibi_slopes == nullptr && args.sinks == nullptr, "FlashAttention-3 has none of these");
  const int32_t* start = memory_.as<int32_t>();
  const int32_t* arrays = start + sms_ + 1;
  MAGA_CUDA(kernel_.run({.q = args.q,
                         .out = args.out,
                         .k = args.layer.k,
                         .v = args.layer.v,
                         .q_stride = args.q_stride,
                         .out_stride = args.out_stride,
                         .page_stride = args.layer.page_stride,
                         .head_stride = args.layer.k_head_stride,
                         .tokens = step.tokens,
                         .heads = shape_.heads,
                         .kv_heads = shape_.kv_heads,
                         .page_tokens = args.layer.page_tokens,
                         .scale = args.scale,
                         .pages = step.pages,
                         .work_start = start,
                         .tile = arrays,
                         .head = arrays + items_,
                         .first_token = arrays + 2 * items_,
                         .first_page = arrays + 3 * items_,
                         .q_length = arrays + 4 * items_,
                         .kv_length = arrays + 5 * items_},
                        queue.stream));
}

std::unique_ptr<Fa3Plan> make_fa3_plan(const AttentionShape& shape, DType type, int64_t tokens) {
  // FlashInfer 0.6.6 takes the values of the first block of keys for those of the first block in a window.
  if (shape.window > 0 || shape.open_prompt >= 0 || shape.head_dim != shape.v_dim) return nullptr;
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
