#include "backends/cuda/linear_mma.cuh"

namespace maga::cuda {
template MmaKernel mma_kernel<__half, codes::kE4m3, true>(const MmaTile& tile);
}
