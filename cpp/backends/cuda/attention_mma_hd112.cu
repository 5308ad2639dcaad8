#include "backends/cuda/attention_mma.cuh"

namespace maga::cuda {

MmaKernels attention_mma_hd112(DType type) { return mma_kernels<112>(type); }

}  // namespace maga::cuda
