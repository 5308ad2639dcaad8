#include "backends/cuda/linear_mma.cuh"

namespace maga::cuda {
template MmaKernel mma_kernel<__half, 8, true>(const MmaTile& tile);
}
