#include "backends/cuda/linear_mma.cuh"

namespace maga::cuda {
template MmaKernel mma_kernel<__half, 8, false>(const MmaTile& tile);
}
