#include "backends/cuda/linear_stream_fp8.cuh"

namespace maga::cuda {
template StreamKernel stream_fp8_kernel<__half, 16>(int rows);
}
