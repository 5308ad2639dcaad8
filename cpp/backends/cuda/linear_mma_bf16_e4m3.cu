#include "backends/cuda/linear_mma.cuh"

namespace maga::cuda {
template MmaKernel mma_kernel<__nv_bfloat16, kE4m3, true>(const MmaTile& tile);
}
