#include "backends/cuda/attention_mma.cuh"

namespace maga::cuda {

MmaKernels attention_mma_hd160(DType type) { return mma_kernels<160>(type); }

}  // namespace maga::cuda
