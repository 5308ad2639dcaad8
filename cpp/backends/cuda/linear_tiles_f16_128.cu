#include "backends/cuda/linear_tiles.cuh"

namespace maga::cuda {
template TileKernel tile_kernel<__half, __half, 2>(int rows);
}
