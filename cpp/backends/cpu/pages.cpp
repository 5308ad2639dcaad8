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
      page_bytes_(maga::page_bytes(program, limits.page_tokens, limits.kv_dtype)),
      memory_(pages_ * page_bytes_ + kSlackBytes, "K/V pages") {
  MAGA_REQUIRE(limits.kv_dtype == DType::f32 || limits.kv_dtype == DType::f16 || limits.kv_dtype == DType::bf16, "K/V pages in ",
               name_of(limits.kv_dtype), ": the CPU backend keeps fp32, fp16 or bf16");
  MAGA_REQUIRE(limits.page_tokens > 0 && limits.page_tokens % kBlockTokens == 0, "K/V pages of ", limits.page_tokens,
               " tokens: the CPU backend takes multiples of ", kBlockTokens);
  std::byte* base = memory_.data();
  for (const CacheLayer& layer : program.cache_layers) {
    const int64_t block_bytes = kBlockTokens * (layer.head_dim + layer.v_dim) * size_of(limits.kv_dtype);
    layers_.push_back({.base = base,
                       .page_bytes = page_bytes_,
                       .blocks_per_page = limits.page_tokens / kBlockTokens,
                       .block_bytes = block_bytes,
                       .kv_heads = layer.kv_heads,
                       .head_dim = layer.head_dim,
                       .v_dim = layer.v_dim,
                       .dtype = limits.kv_dtype});
    base += layer.kv_heads * layers_.back().blocks_per_page * block_bytes;
  }
}

void KvPages::copy(int32_t from, int32_t to) {
  MAGA_CHECK(from >= 0 && from < pages_ && to >= 0 && to < pages_, "page ", from, " to page ", to, " of ", pages_);
  if (from != to)
    std::memcpy(memory_.data() + to * page_bytes_, memory_.data() + from * page_bytes_, static_cast<size_t>(page_bytes_));
}

}  // namespace maga::cpu
