// Where each layer lies in a page.
#include "backends/cpu/pages.h"

#include <cstring>

namespace maga::cpu {
namespace {

// Kernels read whole vectors: past the last value of a row by less than this.
constexpr int64_t kSlackBytes = 64;

}  // namespace

KvPages::KvPages(const Program& program, const Limits& limits)
    : pages_(limits.pages),
      page_bytes_(maga::page_bytes(program, limits)),
      memory_(pages_ * page_bytes_ + kSlackBytes, "K/V pages") {
  MAGA_REQUIRE(limits.page_tokens > 0 && limits.page_tokens % kBlockTokens == 0, "K/V pages of ", limits.page_tokens,
               " tokens: the CPU backend takes multiples of ", kBlockTokens);
  std::byte* base = memory_.data();
  for (size_t i = 0; i < program.cache_layers.size(); ++i) {
    const CacheLayer& layer = program.cache_layers[i];
    const DType type = limits.kv_dtype(static_cast<int64_t>(i));
    const int64_t block_bytes = kBlockTokens * layer.entry_bytes(type) / layer.kv_heads;
    layers_.push_back({.base = base,
                       .page_bytes = page_bytes_,
                       .blocks_per_page = limits.page_tokens / kBlockTokens,
                       .block_bytes = block_bytes,
                       .kv_heads = layer.kv_heads,
                       .head_dim = layer.head_dim,
                       .v_dim = layer.v_dim,
                       .values_in_keys = layer.values_in_keys,
                       .dtype = type,
                       .k_scale = layer.k_scale,
                       .v_scale = layer.v_scale});
    base += layer.kv_heads * layers_.back().blocks_per_page * block_bytes;
  }
}

void KvPages::copy(int32_t from, int32_t to) {
  MAGA_CHECK(from >= 0 && from < pages_ && to >= 0 && to < pages_, "page ", from, " to page ", to, " of ", pages_);
  if (from != to)
    std::memcpy(memory_.data() + to * page_bytes_, memory_.data() + from * page_bytes_, static_cast<size_t>(page_bytes_));
}

}  // namespace maga::cpu
