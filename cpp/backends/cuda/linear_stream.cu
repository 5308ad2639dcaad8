// Launches the streaming linears: tensor maps of weights and tokens, made anew for each call, then the kernel.
#include <cudaTypedefs.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "backends/cuda/launch.cuh"
#include "backends/cuda/linear_stream_args.h"

namespace maga::cuda {
namespace {

constexpr int kMostTokens = 64;

struct MapShape {
  int rank;
  cuuint64_t sizes[4];    // elements, innermost first
  cuuint64_t strides[3];  // bytes, of all but the innermost
  cuuint32_t box[4];
};

// Boxes of 64 columns, 128-byte swizzle; what lies outside reads as zeros.
CUtensorMap encode(DType type, const void* data, const MapShape& shape) {
  static const auto encode_tiled = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    MAGA_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
    MAGA_CHECK(found == cudaDriverEntryPointSuccess && function, "the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  const cuuint32_t every[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      encode_tiled(&map, type == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, shape.rank,
                   const_cast<void*>(data), shape.sizes, shape.strides, shape.box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
                   CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  MAGA_CHECK(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled: ", static_cast<int>(result), ", rank ", shape.rank, ", ",
             shape.sizes[0], " columns, ", shape.sizes[1], " rows, stride ", shape.strides[0], " bytes");
  return map;
}

MapShape rows_of(uint64_t rows, uint64_t columns, uint64_t stride, int box_rows) {
  return {2, {columns, rows}, {stride * 2}, {64, static_cast<cuuint32_t>(box_rows)}};
}
// Eight rows of the gate, the eight of up that belong to them, the next eight of the gate, ...
MapShape gated_rows_of(uint64_t n, uint64_t k, int box_rows) {
  return {4, {k, 8, 2, n / 8}, {k * 2, n * k * 2, 8 * k * 2}, {64, 8, 2, static_cast<cuuint32_t>(box_rows / 16)}};
}

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
  const CUtensorMap weights = encode(
      args.type, args.weight, args.gated ? gated_rows_of(args.n, args.k, tile.rows) : rows_of(args.n, args.k, args.k, tile.rows));
  const CUtensorMap tokens = encode(args.type, args.x, rows_of(args.m, args.k, args.x_stride, config.tokens));
  launch(queue, kernel, dim3(config.ctas * config.split), dim3(128 * tile.groups + 64),
         stream_shared_bytes(tile, config.tokens, config.stages), arguments, weights, tokens);
}

}  // namespace maga::cuda
