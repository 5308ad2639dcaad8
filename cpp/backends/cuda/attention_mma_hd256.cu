#include "backends/cuda/attention_mma.cuh"

namespace maga::cuda {

MmaKernels attention_mma_hd256(DType type) { return mma_kernels<256>(type); }

}  // namespace maga::cuda
