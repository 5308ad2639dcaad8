#include "backends/cuda/linear_mma.cuh"

namespace maga::cuda {
template MmaKernel mma_kernel<__half, 4, false>(const MmaTile& tile);
}
