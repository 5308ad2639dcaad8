#include "backends/cuda/linear_stream.cuh"

namespace maga::cuda {
template StreamKernel stream_kernel<__nv_bfloat16, 16>(int rows);
}
