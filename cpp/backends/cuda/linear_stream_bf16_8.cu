#include "backends/cuda/linear_stream.cuh"

namespace maga::cuda {
template StreamKernel stream_kernel<__nv_bfloat16, 8>(int rows);
}
