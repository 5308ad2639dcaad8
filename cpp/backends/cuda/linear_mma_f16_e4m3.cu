#include "backends/cuda/linear_mma.cuh"

namespace maga::cuda {
template MmaKernel mma_kernel<__half, kE4m3, true>(const MmaTile& tile);
}
