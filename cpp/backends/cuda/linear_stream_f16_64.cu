#include "backends/cuda/linear_stream.cuh"

namespace maga::cuda {
template StreamKernel stream_kernel<__half, 64>(int rows);
}
