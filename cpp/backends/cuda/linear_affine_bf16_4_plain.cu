#include "backends/cuda/linear_affine.cuh"

namespace maga::cuda {
template AffineKernel affine_kernel<__nv_bfloat16, 4, true>(const AffineTile& tile);
}
