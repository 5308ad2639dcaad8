#include "backends/cuda/attention_fa3.cuh"

namespace maga::cuda {

Fa3Kernel attention_fa3_hd64_f16() { return fa3_kernel<cutlass::half_t, 64>(); }

}  // namespace maga::cuda
