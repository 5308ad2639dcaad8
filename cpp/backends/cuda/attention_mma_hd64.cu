#include "backends/cuda/attention_mma.cuh"

namespace maga::cuda {

MmaKernels attention_mma_hd64(DType type) { return mma_kernels<64>(type); }

}  // namespace maga::cuda
