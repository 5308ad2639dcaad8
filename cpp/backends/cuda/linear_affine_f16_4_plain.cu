#include "backends/cuda/linear_affine.cuh"

namespace maga::cuda {
template AffineKernel affine_kernel<__half, 4, true>(const AffineTile& tile);
}
