// What is the same for every backend.
#include "backends/backend.h"

namespace maga {

int64_t page_bytes(const Program& program, const Limits& limits) {
  const int64_t layers = static_cast<int64_t>(program.cache_layers.size()), types = static_cast<int64_t>(limits.kv_dtypes.size());
  MAGA_REQUIRE(types == 1 || types == layers, types, " types of keys and values for ", layers, " cache layers");
  for (const DType type : limits.kv_dtypes)
    MAGA_REQUIRE(type == DType::f32 || type == DType::f16 || type == DType::bf16 || is_code(type), "keys and values in ",
                 name_of(type), "; fp32, fp16, bf16, int8, fp8_e4m3 and fp8_e5m2 can be had");
  int64_t entry = 0;
  for (int64_t i = 0; i < layers; ++i) {
    const DType type = limits.kv_dtype(i);
    MAGA_REQUIRE(!program.cache_layers[i].values_in_keys || !is_code(type), "layer ", i, " keeps latent states in ", name_of(type),
                 "; fp32, fp16 and bf16 can be had for those");
    entry += program.cache_layers[i].entry_bytes(type);
  }
  return entry * limits.page_tokens;
}

void Executable::enqueue(const Step&, std::span<const Draw>) { MAGA_CHECK(false, "this backend runs its steps at once"); }
std::span<const Drawn> Executable::collect() { MAGA_CHECK(false, "this backend runs its steps at once"); }

void Executable::fill_pages(int32_t layer, std::span<const float> keys, std::span<const float> values) {
  const auto& layers = program().cache_layers;
  MAGA_REQUIRE(layer >= 0 && layer < static_cast<int32_t>(layers.size()), "layer ", layer, " of ", layers.size());
  const CacheLayer& form = layers[layer];
  const int64_t kv_heads = form.kv_heads, head_dim = form.head_dim, v_dim = form.v_dim;
  MAGA_REQUIRE(!form.values_in_keys, "layer ", layer, " keeps latent states, not keys and values that could be given");
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
