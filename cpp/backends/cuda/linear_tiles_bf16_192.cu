#include "backends/cuda/linear_tiles.cuh"

namespace maga::cuda {
template TileKernel tile_kernel<__nv_bfloat16, __nv_bfloat16, 3>(int rows);
}
