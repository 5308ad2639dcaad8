#include "backends/cuda/attention_mma.cuh"

namespace maga::cuda {

MmaKernels attention_mma_hd128(DType type) { return mma_kernels<128>(type); }

}  // namespace maga::cuda
