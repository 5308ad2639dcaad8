// Launches the linears of codes on any card from sm_80 on, of one weight or of experts.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>

#include "backends/cuda/launch.cuh"
#include "backends/cuda/linear_mma_args.h"

namespace maga::cuda {
namespace {

constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }
bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

MmaKernel kernel_of(DType type, const AffineLayout& layout, const MmaTile& tile) {
  const bool plain = affine_plain(layout);
  auto of = [&]<typename T>(T) {
    if (layout.bits == kE4m3) return mma_kernel<T, kE4m3, true>(tile);
    if (layout.bits == 4) return plain ? mma_kernel<T, 4, true>(tile) : mma_kernel<T, 4, false>(tile);
    return plain ? mma_kernel<T, 8, true>(tile) : mma_kernel<T, 8, false>(tile);
  };
  return type == DType::bf16 ? of(__nv_bfloat16{}) : of(__half{});
}

// Of the sizes that both forms of a call have.
bool takes_sizes(DType type, const WeightLayout& layout, int n, bool gated) {
  return layout.form == WeightForm::affine && type != DType::f32 && (!gated || n % kUnitRows == 0);
}

}  // namespace

Mmas::Mmas() {
  int device = 0, major = 0, shared = 0, shared_of_sm = 0, reserved = 0;
  const auto attribute = [&](cudaDeviceAttr which, int* value) { MAGA_CUDA(cudaDeviceGetAttribute(value, which, device)); };
  MAGA_CUDA(cudaGetDevice(&device));
  attribute(cudaDevAttrComputeCapabilityMajor, &major);
  attribute(cudaDevAttrMultiProcessorCount, &card_.sms);
  attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, &shared);
  attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, &shared_of_sm);
  attribute(cudaDevAttrReservedSharedMemoryPerBlock, &reserved);
  card_.shared = shared - kMmaTables;
  card_.shared_of_two = shared_of_sm / 2 - reserved - kMmaTables;
  has_mma_ = major >= 8;
}

bool Mmas::takes(const LinearArgs& args) const { return has_mma_ && takes_sizes(args.type, args.layout, args.n, args.gated); }

MmaShape Mmas::shape_of(const LinearArgs& args) const {
  return {.m = args.m,
          .rows = args.gated ? 2 * args.n : args.n,
          .k = args.k,
          .layout = args.layout.affine,
          .may_split = args.slabs && !args.gated};
}

void Mmas::launch_kernel(const Queue& queue, DType type, const AffineLayout& layout, const MmaConfig& config, MmaArgs& args) {
  const MmaKernel kernel = kernel_of(type, layout, config.tile);
  MAGA_CHECK(kernel, "no kernel of ", config.tile.tokens, " tokens for codes of ", layout.bits, " bits");
  if (std::find(raised_.begin(), raised_.end(), reinterpret_cast<const void*>(kernel)) == raised_.end()) {
    MAGA_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, card_.shared + kMmaTables));
    raised_.push_back(reinterpret_cast<const void*>(kernel));
  }
  args.across = divide_up(args.k, kUnitColumns);
  args.steps = divide_up(args.across, config.deep * mma_step_units(config.tile.tokens, layout.bits));
  args.split = config.split, args.stages = config.stages, args.deep = config.deep;
  args.row_tiles = divide_up(args.rows, mma_rows(config.tile, config.deep));
  args.token_tiles = divide_up(args.m, config.tile.tokens);
  args.sets = layout.sets, args.unit_bytes = affine_unit_bytes(layout), args.shift = layout.shift;
  args.step_bytes = mma_step_bytes(config.tile, layout, config.deep);
  args.x_aligned = aligned(args.x) && args.x_stride % 8 == 0;
  const int shared = (args.counts ? kMmaTables : 0) + config.stages * args.step_bytes + mma_sums_bytes(config.tile, config.deep);
  launch(queue, kernel, dim3(config.ctas * config.split), dim3(kMmaThreads), shared, args);
}

void Mmas::run(const Queue& queue, const LinearArgs& args, const MmaConfig& config) {
  MmaArgs arguments{.weight = static_cast<const uint8_t*>(args.weight),
                    .x = args.x,
                    .out = args.out,
                    .slabs = config.split > 1 ? args.slabs : nullptr,
                    .bias = args.bias,
                    .residual = args.residual,
                    .x_stride = args.x_stride,
                    .out_stride = args.out_stride,
                    .residual_stride = args.residual_stride,
                    .m = args.m,
                    .rows = args.gated ? 2 * args.n : args.n,
                    .k = args.k,
                    .out_f32 = args.out_type == DType::f32,
                    .gated = args.gated,
                    .gating = {.kind = args.activation}};
  launch_kernel(queue, args.type, args.layout.affine, config, arguments);
}

bool Mmas::takes(DType type, const MoeGemmArgs& args) const {
  // Experts' rows start at whole units.
  return has_mma_ && takes_sizes(type, args.layout, args.n, args.gated) && args.n % kUnitRows == 0;
}

void Mmas::run(const Queue& queue, DType type, const MoeGemmArgs& args) {
  const int rows = args.gated ? 2 * args.n : args.n;
  const double touched = args.experts * (1 - std::pow(1 - double(args.top_k) / args.experts, args.tokens));
  const double slots = double(args.tokens) * args.top_k / touched;
  MmaConfig config = choose_mma({.matrices = touched,
                                 .m = static_cast<int>(std::ceil(slots < 64 ? 1.5 * slots : slots)),
                                 .rows = rows,
                                 .k = args.k,
                                 .layout = args.layout.affine},
                                card_);
  // How many tiles there are only the device knows.
  const int shared =
      config.stages * mma_step_bytes(config.tile, args.layout.affine, config.deep) + mma_sums_bytes(config.tile, config.deep);
  config.ctas = config.tile.tokens <= 32 && shared <= card_.shared_of_two ? 2 * card_.sms : card_.sms;
  MmaArgs arguments{.weight = static_cast<const uint8_t*>(args.weight),
                    .x = args.x,
                    .out = args.out,
                    .bias = args.bias,
                    .x_stride = args.k,
                    .out_stride = args.n,
                    .counts = args.counts,
                    .experts = args.experts,
                    .m = args.tokens * args.top_k,
                    .rows = rows,
                    .k = args.k,
                    .gated = args.gated,
                    .first = args.gated,
                    .gating = args.gating};
  launch_kernel(queue, type, args.layout.affine, config, arguments);
}

}  // namespace maga::cuda
