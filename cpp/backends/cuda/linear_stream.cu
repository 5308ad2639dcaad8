// Launches the streaming linears: tensor maps of weights and tokens, made anew for each call, then the kernel.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "backends/cuda/launch.cuh"
#include "backends/cuda/linear_maps.h"
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
  return hopper_ && args.m <= kMostTokens && args.type != DType::f32 && args.k % 8 == 0 && args.x_stride % 8 == 0 &&
         (!args.gated || args.n % 8 == 0) && aligned(args.weight) && aligned(args.x);
}

StreamShape Streams::shape_of(const LinearArgs& args) const {
  return {.m = args.m, .rows = args.gated ? 2 * args.n : args.n, .k = args.k, .may_split = args.slabs && !args.gated, .sms = sms_};
}

void Streams::run(const Queue& queue, const LinearArgs& args, const StreamConfig& config) {
  const StreamShape shape = shape_of(args);
  const StreamTile& tile = config.tile;
  const StreamKernel kernel =
      args.type == DType::bf16 ? kernel_of<__nv_bfloat16>(config.tokens, tile.rows) : kernel_of<__half>(config.tokens, tile.rows);
  MAGA_CHECK(kernel, "no streaming kernel of ", tile.rows, " rows");
  if (std::find(raised_.begin(), raised_.end(), reinterpret_cast<const void*>(kernel)) == raised_.end()) {
    MAGA_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kStreamMostShared));
    raised_.push_back(reinterpret_cast<const void*>(kernel));
  }
  const StreamArgs arguments{.out = args.out,
                             .slabs = config.split > 1 ? args.slabs : nullptr,
                             .bias = args.bias,
                             .residual = args.residual,
                             .out_stride = args.out_stride,
                             .residual_stride = args.residual_stride,
                             .m = args.m,
                             .rows = shape.rows,
                             .steps = (args.k + 64 * tile.boxes - 1) / (64 * tile.boxes),
                             .split = config.split,
                             .stages = config.stages,
                             .window = config.window,
                             .out_f32 = args.out_type == DType::f32,
                             .gated = args.gated,
                             .activation = args.activation};
  const CUtensorMap weights = weight_map(args, tile.rows), tokens = token_map(args, config.tokens);
  launch(queue, kernel, dim3(config.ctas * config.split), dim3(128 * tile.groups + 64),
         stream_shared_bytes(tile, config.tokens, config.stages), arguments, weights, tokens);
}

}  // namespace maga::cuda
