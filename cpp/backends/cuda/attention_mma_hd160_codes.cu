#include "backends/cuda/attention_mma.cuh"

namespace maga::cuda {

MmaKernels attention_mma_hd160_codes(DType kv_type) { return mma_code_kernels<160>(kv_type); }

}  // namespace maga::cuda
