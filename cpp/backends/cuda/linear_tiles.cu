// Launches the tiled linears: tensor maps of weights and tokens, made anew for each call, then the kernel.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>

#include "backends/cuda/launch.cuh"
#include "backends/cuda/linear_hopper.cuh"
#include "backends/cuda/linear_maps.h"
#include "backends/cuda/linear_tiles_args.h"

namespace maga::cuda {
namespace {

constexpr int kFewestTokens = 65;
constexpr int kBandTokens = 2048;

constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }
template <typename E, typename T>
TileKernel kernel_of(const Tile& tile) {
  return (tile.groups == 2 ? tile_kernel<E, T, 2> : tile_kernel<E, T, 3>)(tile.rows);
}

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace

Tiles::Tiles() {
  int device = 0, major = 0;
  MAGA_CUDA(cudaGetDevice(&device));
  MAGA_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  MAGA_CUDA(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, device));
  hopper_ = major == 9;
}

bool Tiles::takes_slabs(const LinearArgs& args) const {
  if (!hopper_ || args.m < kFewestTokens || args.type == DType::f32 || args.n % 8 != 0) return false;
  if (args.layout.form == WeightForm::fp8) return true;  // the upload saw to the weight, and tokens are rounded into place
  return args.k % 8 == 0 && args.x_stride % 8 == 0 && aligned(args.weight) && aligned(args.x);
}

bool Tiles::takes(const LinearArgs& args) const {
  if (!takes_slabs(args) || args.slabs) return takes_slabs(args);
  return aligned(args.out) && args.out_stride * size_of(args.out_type) % 16 == 0 &&
         (!args.residual || (aligned(args.residual) && args.residual_stride % 8 == 0));
}

TileShape Tiles::shape_of(const LinearArgs& args) const {
  return {.m = args.m,
          .rows = args.gated ? 2 * args.n : args.n,
          .k = args.k,
          .gated = args.gated,
          .may_split = args.slabs && !args.gated,
          .sms = sms_,
          .fp8 = args.layout.form == WeightForm::fp8};
}

void Tiles::run(const Queue& queue, const LinearArgs& args, const TileConfig& config) {
  const TileShape shape = shape_of(args);
  const Tile& tile = config.tile;
  const TileKernel kernel = shape.fp8                  ? (args.type == DType::bf16 ? kernel_of<__nv_fp8_e4m3, __nv_bfloat16>(tile)
                                                                                   : kernel_of<__nv_fp8_e4m3, __half>(tile))
                            : args.type == DType::bf16 ? kernel_of<__nv_bfloat16, __nv_bfloat16>(tile)
                                                       : kernel_of<__half, __half>(tile);
  MAGA_CHECK(kernel, "no tiled kernel of ", tile.groups, " x ", tile.rows);
  if (std::find(raised_.begin(), raised_.end(), reinterpret_cast<const void*>(kernel)) == raised_.end()) {
    MAGA_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, tile_shared_bytes(tile)));
    raised_.push_back(reinterpret_cast<const void*>(kernel));
  }
  const int tokens = 64 * tile.groups;
  const int unit_tokens = config.share_weights ? 2 * tokens : tokens, unit_rows = config.share_weights ? tile.rows : 2 * tile.rows;
  TileArgs arguments{.out = args.out,
                     .slabs = config.split > 1 ? args.slabs : nullptr,
                     .bias = args.slabs ? nullptr : args.bias,
                     .residual = args.slabs ? nullptr : args.residual,
                     .out_stride = args.out_stride,
                     .residual_stride = args.residual_stride,
                     .m = args.m,
                     .rows = shape.rows,
                     .steps = divide_up(args.k, shape.fp8 ? 128 : 64),
                     .split = config.split,
                     .token_units = divide_up(args.m, unit_tokens),
                     .row_units = divide_up(shape.rows, unit_rows),
                     .band = kBandTokens / unit_tokens,
                     .weight_policy = hopper::kEvictNormal,
                     .share_weights = config.share_weights,
                     .out_f32 = args.out_type == DType::f32,
                     .gated = args.gated,
                     .activation = args.activation};
  if (shape.fp8) {
    arguments.x_scale = args.x_scale, arguments.x_scale_stride = quantized_scale_stride(args.m);
    arguments.weight_scale = fp8_scales(args.weight, shape.rows, args.k);
  }
  if (arguments.token_units == 1) arguments.weight_policy = hopper::kEvictFirst;  // read once
  const int items = arguments.token_units * arguments.row_units * arguments.split;
  const CUtensorMap weights = weight_map(args, tile.rows / 2), x = token_map(args, tokens / 2);
  launch(queue, kernel, dim3(2 * std::min(items, sms_ / 2)), dim3(128 * (tile.groups + 1)), tile_shared_bytes(tile), arguments,
         weights, x);
}

}  // namespace maga::cuda
