#include "backends/cuda/attention_mma.cuh"

namespace maga::cuda {

MmaKernels attention_mma_hd80_codes(DType kv_type) { return mma_code_kernels<80>(kv_type); }

}  // namespace maga::cuda
