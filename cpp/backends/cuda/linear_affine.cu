// Launches the linears of codes: tensor maps of units and tokens, made anew for each call, then the kernel.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "backends/cuda/launch.cuh"
#include "backends/cuda/linear_affine_args.h"
#include "backends/cuda/linear_maps.h"
#include "backends/cuda/tensor_map.h"

namespace maga::cuda {
namespace {

constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }
bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// (words of a unit, units of a row, rows / 8); gated: the rows alternate between a unit of the gate and its unit of up.
CUtensorMap unit_map(const LinearArgs& args, const AffineShape& shape, const AffineTile& tile) {
  const auto words = static_cast<cuuint64_t>(affine_unit_bytes(shape.layout) / 8);
  const auto across = static_cast<cuuint64_t>(divide_up(shape.k, kUnitColumns)), row = words * across;
  const auto word_box = static_cast<cuuint32_t>(words), rows = static_cast<cuuint32_t>(tile.rows() / kUnitRows);
  const auto step = static_cast<cuuint32_t>(affine_step_units(tile, shape.layout.bits));
  const auto down = static_cast<cuuint64_t>(divide_up(args.n, kUnitRows));
  if (!args.gated) return word_map(args.weight, {3, {words, across, down}, {words, row}, {word_box, step, rows}});
  return word_map(args.weight, {4, {words, across, 2, down}, {words, row * down, row}, {word_box, step, 2, rows / 2}});
}

AffineKernel kernel_of(DType type, const AffineLayout& layout, const AffineTile& tile) {
  const bool plain = affine_plain(layout);
  auto of = [&]<typename T>(T) {
    if (layout.bits == 4) return plain ? affine_kernel<T, 4, true>(tile) : affine_kernel<T, 4, false>(tile);
    return plain ? affine_kernel<T, 8, true>(tile) : affine_kernel<T, 8, false>(tile);
  };
  return type == DType::bf16 ? of(__nv_bfloat16{}) : of(__half{});
}

}  // namespace

Affines::Affines() {
  int device = 0, major = 0;
  MAGA_CUDA(cudaGetDevice(&device));
  MAGA_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  MAGA_CUDA(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, device));
  hopper_ = major == 9;
}

bool Affines::takes(const LinearArgs& args) const {
  return hopper_ && args.layout.form == WeightForm::affine && args.layout.affine.bits != kE4m3 && args.type != DType::f32 &&
         args.x_stride % 8 == 0 && aligned(args.x) && (!args.gated || args.n % kUnitRows == 0);
}

AffineShape Affines::shape_of(const LinearArgs& args) const {
  return {.m = args.m,
          .rows = args.gated ? 2 * args.n : args.n,
          .k = args.k,
          .layout = args.layout.affine,
          .may_split = args.slabs && !args.gated,
          .sms = sms_};
}

void Affines::run(const Queue& queue, const LinearArgs& args, const AffineConfig& config) {
  const AffineShape shape = shape_of(args);
  const AffineTile& tile = config.tile;
  const int bits = shape.layout.bits;
  const AffineKernel kernel = kernel_of(args.type, shape.layout, tile);
  MAGA_CHECK(kernel, "no kernel of ", tile.rows(), " rows and ", tile.tokens, " tokens for codes of ", bits, " bits");
  if (std::find(raised_.begin(), raised_.end(), reinterpret_cast<const void*>(kernel)) == raised_.end()) {
    MAGA_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kAffineMostShared));
    raised_.push_back(reinterpret_cast<const void*>(kernel));
  }
  const AffineArgs arguments{.out = args.out,
                             .slabs = config.split > 1 ? args.slabs : nullptr,
                             .bias = args.bias,
                             .residual = args.residual,
                             .out_stride = args.out_stride,
                             .residual_stride = args.residual_stride,
                             .m = args.m,
                             .rows = shape.rows,
                             .steps = divide_up(args.k, kUnitColumns * affine_step_units(tile, bits)),
                             .split = config.split,
                             .stages = config.stages,
                             .window = config.window,
                             .token_tiles = divide_up(args.m, tile.tokens),
                             .sets = shape.layout.sets,
                             .unit_bytes = affine_unit_bytes(shape.layout),
                             .step_bytes = affine_step_bytes(tile, shape.layout),
                             .shift = shape.layout.shift,
                             .out_f32 = args.out_type == DType::f32,
                             .gated = args.gated,
                             .activation = args.activation};
  const CUtensorMap units = unit_map(args, shape, tile), tokens = token_map(args, tile.tokens);
  launch(queue, kernel, dim3(config.ctas * config.split), dim3(128 * (tile.groups + 1)),
         affine_shared_bytes(tile, shape.layout, config.stages), arguments, units, tokens);
}

}  // namespace maga::cuda
