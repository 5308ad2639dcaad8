#include "backends/cuda/linear_mma.cuh"

namespace maga::cuda {
template MmaKernel mma_kernel<__half, 4, true>(const MmaTile& tile);
}
