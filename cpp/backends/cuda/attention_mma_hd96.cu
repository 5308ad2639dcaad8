#include "backends/cuda/attention_mma.cuh"

namespace maga::cuda {

MmaKernels attention_mma_hd96(DType type) { return mma_kernels<96>(type); }

}  // namespace maga::cuda
