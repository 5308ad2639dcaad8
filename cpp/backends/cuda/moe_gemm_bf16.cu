#include "backends/cuda/moe_gemm.cuh"

namespace maga::cuda {
template MoeKernel moe_kernel<__nv_bfloat16>(const MoeConfig& config);
}
