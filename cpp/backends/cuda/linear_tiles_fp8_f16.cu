#include "backends/cuda/linear_tiles.cuh"

namespace maga::cuda {
template TileKernel tile_kernel<__nv_fp8_e4m3, __half, 2>(int rows);
template TileKernel tile_kernel<__nv_fp8_e4m3, __half, 3>(int rows);
}  // namespace maga::cuda
