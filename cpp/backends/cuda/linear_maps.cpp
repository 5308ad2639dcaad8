#include "backends/cuda/linear_maps.h"

#include <cudaTypedefs.h>

#include "backends/cuda/cuda_check.h"

namespace maga::cuda {
namespace {

struct MapShape {
  cuuint32_t rank;
  cuuint64_t sizes[4];    // elements, innermost first
  cuuint64_t strides[3];  // bytes, of all but the innermost
  cuuint32_t box[4];
};

CUtensorMap encode(CUtensorMapDataType type, const void* data, const MapShape& shape) {
  static const auto encode_tiled = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    MAGA_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
    MAGA_CHECK(found == cudaDriverEntryPointSuccess && function, "the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  const cuuint32_t every[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = encode_tiled(&map, type, shape.rank, const_cast<void*>(data), shape.sizes, shape.strides, shape.box,
                                       every, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                       CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  MAGA_CHECK(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled: ", static_cast<int>(result), ", rank ", shape.rank, ", ",
             shape.sizes[0], " columns, ", shape.sizes[1], " rows, stride ", shape.strides[0], " bytes");
  return map;
}

bool is_fp8(const LinearArgs& args) { return args.layout.form == WeightForm::fp8; }
CUtensorMapDataType element_of(const LinearArgs& args) {
  if (is_fp8(args)) return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  return args.type == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

CUtensorMap rows_map(const LinearArgs& args, const void* data, int rows, int64_t stride, int box_rows) {
  const cuuint64_t bytes = is_fp8(args) ? 1 : 2;
  return encode(element_of(args), data,
                {2,
                 {static_cast<cuuint64_t>(args.k), static_cast<cuuint64_t>(rows)},
                 {static_cast<cuuint64_t>(stride) * bytes},
                 {static_cast<cuuint32_t>(128 / bytes), static_cast<cuuint32_t>(box_rows)}});
}

}  // namespace

CUtensorMap weight_map(const LinearArgs& args, int box_rows) {
  if (!args.gated) return rows_map(args, args.weight, args.n, args.k, box_rows);
  const cuuint64_t bytes = is_fp8(args) ? 1 : 2;
  const auto n = static_cast<cuuint64_t>(args.n), k = static_cast<cuuint64_t>(args.k);
  return encode(element_of(args), args.weight,
                {4,
                 {k, 8, 2, n / 8},
                 {k * bytes, n * k * bytes, 8 * k * bytes},
                 {static_cast<cuuint32_t>(128 / bytes), 8, 2, static_cast<cuuint32_t>(box_rows / 16)}});
}

CUtensorMap token_map(const LinearArgs& args, int box_rows) { return rows_map(args, args.x, args.m, args.x_stride, box_rows); }

}  // namespace maga::cuda
