#include "backends/cuda/attention_mma.cuh"

namespace maga::cuda {

MmaKernels attention_mma_hd96_codes(DType kv_type) { return mma_code_kernels<96>(kv_type); }

}  // namespace maga::cuda
