#include "backends/cuda/linear_affine.cuh"

namespace maga::cuda {
template AffineKernel affine_kernel<__nv_bfloat16, 8, true>(const AffineTile& tile);
}
