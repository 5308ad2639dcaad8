#include "backends/cuda/attention_mma.h"

namespace maga::cuda {

MmaKernels attention_mma(DType type, int head_dim) {
  if (type != DType::f16 && type != DType::bf16) return {};
  switch (head_dim) {
#define MAGA_CASE(d) \
  case d: return attention_mma_hd##d(type);
    MAGA_MMA_HEAD_DIMS(MAGA_CASE)
#undef MAGA_CASE
    default: return {};
  }
}

}  // namespace maga::cuda
