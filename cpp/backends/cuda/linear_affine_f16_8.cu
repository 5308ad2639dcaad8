#include "backends/cuda/linear_affine.cuh"

namespace maga::cuda {
template AffineKernel affine_kernel<__half, 8, false>(const AffineTile& tile);
}
