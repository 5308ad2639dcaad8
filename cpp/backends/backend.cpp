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

}  // namespace maga
