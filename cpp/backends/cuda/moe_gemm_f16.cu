#include "backends/cuda/moe_gemm.cuh"

namespace maga::cuda {
template MoeKernel moe_kernel<__half>(const MoeConfig& config);
}
