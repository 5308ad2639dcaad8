#include "backends/cuda/attention_mma.cuh"

namespace maga::cuda {

MmaKernels attention_mma_hd192(DType type) { return mma_kernels<192>(type); }

}  // namespace maga::cuda
