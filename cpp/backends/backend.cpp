// What is the same for every backend.
#include "backends/backend.h"

namespace maga {

int64_t page_bytes(const Program& program, int64_t page_tokens, DType kv_dtype) {
  int64_t elements = 0;
  for (const CacheLayer& layer : program.cache_layers) elements += layer.kv_heads * (layer.head_dim + layer.v_dim);
  return elements * page_tokens * size_of(kv_dtype);
}

void Executable::enqueue(const Step&, std::span<const Draw>) { MAGA_CHECK(false, "this backend runs its steps at once"); }
std::span<const Drawn> Executable::collect() { MAGA_CHECK(false, "this backend runs its steps at once"); }

void Executable::fill_pages(int32_t layer, std::span<const float> keys, std::span<const float> values) {
  const auto& layers = program().cache_layers;
  MAGA_REQUIRE(layer >= 0 && layer < static_cast<int32_t>(layers.size()), "layer ", layer, " of ", layers.size());
  const auto& [kv_heads, head_dim, v_dim] = layers[layer];
  const int64_t tokens = static_cast<int64_t>(keys.size()) / (kv_heads * head_dim);
  MAGA_REQUIRE(static_cast<int64_t>(keys.size()) == tokens * kv_heads * head_dim &&
                   static_cast<int64_t>(values.size()) == tokens * kv_heads * v_dim &&
                   tokens <= limits().pages * limits().page_tokens,
               keys.size(), " elements of keys and ", values.size(), " of values for ", limits().pages, " pages of ",
               limits().page_tokens, " tokens, with ", kv_heads, " heads of ", head_dim, " and ", v_dim);
  fill(layer, tokens, keys.data(), values.data());
}

void Executable::fill(int32_t, int64_t, const float*, const float*) {
  MAGA_CHECK(false, "this backend takes no K/V entries that are given");
}

}  // namespace maga
