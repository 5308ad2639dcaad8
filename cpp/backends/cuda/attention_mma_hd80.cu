#include "backends/cuda/attention_mma.cuh"

namespace maga::cuda {

MmaKernels attention_mma_hd80(DType type) { return mma_kernels<80>(type); }

}  // namespace maga::cuda
