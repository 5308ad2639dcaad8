#include "backends/cuda/attention_mma.h"

namespace maga::cuda {

MmaKernels attention_mma(DType type, DType kv_type, int head_dim) {
  if ((type != DType::f16 && type != DType::bf16) || (kv_type != type && !is_code(kv_type))) return {};
  switch (head_dim) {
#define MAGA_CASE(d) \
  case d: return is_code(kv_type) ? attention_mma_hd##d##_codes(kv_type) : attention_mma_hd##d(type);
    MAGA_MMA_HEAD_DIMS(MAGA_CASE)
#undef MAGA_CASE
    default: return {};
  }
}

}  // namespace maga::cuda
