// Launches the streaming linears: tensor maps of weights and tokens, made anew for each call, then the kernel.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "backends/cuda/launch.cuh"
#include "backends/cuda/linear_maps.h"
#include "backends/cuda/linear_quantize.h"
#include "backends/cuda/linear_stream_args.h"

namespace maga::cuda {
namespace {

constexpr int kMostTokens = 64;

template <typename T>
StreamKernel kernel_of(int tokens, int rows) {
  switch (tokens) {
    case 8: return stream_kernel<T, 8>(rows);
    case 16: return stream_kernel<T, 16>(rows);
    case 32: return stream_kernel<T, 32>(rows);
    default: return stream_kernel<T, 64>(rows);
  }
}

template <typename T>
StreamKernel fp8_kernel_of(int tokens, int rows) {
  switch (tokens) {
    case 8: return stream_fp8_kernel<T, 8>(rows);
    case 16: return stream_fp8_kernel<T, 16>(rows);
    case 32: return stream_fp8_kernel<T, 32>(rows);
    default: return stream_fp8_kernel<T, 64>(rows);
  }
}

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace

Streams::Streams() {
  int device = 0, major = 0;
  MAGA_CUDA(cudaGetDevice(&device));
  MAGA_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  MAGA_CUDA(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, device));
  hopper_ = major == 9;
}

bool Streams::takes(const LinearArgs& args) const {
  if (!hopper_ || args.m > kMostTokens || args.type == DType::f32 || (args.gated && args.n % 8 != 0)) return false;
  if (args.layout.form == WeightForm::fp8) return true;  // the upload saw to the weight, and tokens may lie anywhere
  return args.k % 8 == 0 && args.x_stride % 8 == 0 && aligned(args.weight) && aligned(args.x);
}

StreamShape Streams::shape_of(const LinearArgs& args) const {
  return {.m = args.m,
          .rows = args.gated ? 2 * args.n : args.n,
          .k = args.k,
          .may_split = args.slabs && !args.gated,
          .sms = sms_,
          .fp8 = args.layout.form == WeightForm::fp8};
}

void Streams::run(const Queue& queue, const LinearArgs& call, const StreamConfig& config) {
  const StreamShape shape = shape_of(call);
  const bool rounds = shape.fp8 && stream_rounds(config.tokens);
  const LinearArgs args = shape.fp8 && !rounds ? linear_quantize(queue, call) : call;
  const StreamTile& tile = config.tile;
  const int columns = shape.fp8 ? 128 : 64;  // of a box
  StreamArgs arguments{.out = args.out,
                       .slabs = config.split > 1 ? args.slabs : nullptr,
                       .bias = args.bias,
                       .residual = args.residual,
                       .out_stride = args.out_stride,
                       .residual_stride = args.residual_stride,
                       .m = args.m,
                       .rows = shape.rows,
                       .steps = (args.k + columns * tile.boxes - 1) / (columns * tile.boxes),
                       .split = config.split,
                       .stages = config.stages,
                       .window = config.window,
                       .out_f32 = args.out_type == DType::f32,
                       .gated = args.gated,
                       .activation = args.activation};
  const dim3 grid(config.ctas * config.split), block(stream_threads(tile, config.tokens, shape.fp8));
  const int bytes = stream_shared_bytes(tile, config.tokens, config.stages, shape.fp8);
  if (shape.fp8) arguments.weight_scale = fp8_scales(args.weight, shape.rows, args.k);
  if (rounds) {
    arguments.x = args.x, arguments.x_stride = args.x_stride, arguments.k = args.k;
    arguments.x_aligned = aligned(args.x) && args.x_stride % 8 == 0;
  } else if (shape.fp8) {
    arguments.x_scale = args.x_scale, arguments.x_runs = scale_runs(args.k);
  }
  const auto kernel_for = [&]<typename T>(T) {
    return shape.fp8 ? fp8_kernel_of<T>(config.tokens, tile.rows) : kernel_of<T>(config.tokens, tile.rows);
  };
  const StreamKernel kernel = args.type == DType::bf16 ? kernel_for(__nv_bfloat16{}) : kernel_for(__half{});
  MAGA_CHECK(kernel, "no streaming kernel of ", config.tokens, " x ", tile.rows);
  if (std::find(raised_.begin(), raised_.end(), reinterpret_cast<const void*>(kernel)) == raised_.end()) {
    MAGA_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kStreamMostShared));
    raised_.push_back(reinterpret_cast<const void*>(kernel));
  }
  const CUtensorMap weights = weight_map(args, tile.rows);
  launch(queue, kernel, grid, block, bytes, arguments, weights, rounds ? weights : token_map(args, config.tokens));
}

}  // namespace maga::cuda
