#include "backends/cuda/tensor_map.h"

#include <cudaTypedefs.h>

#include "backends/cuda/cuda_check.h"

namespace maga::cuda {

namespace {

struct Elements {
  CUtensorMapDataType type;
  int bytes;
  CUtensorMapSwizzle swizzle;
};

CUtensorMap encode(const Elements& elements, const void* data, const TensorShape& shape) {
  static const auto encode_tiled = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    MAGA_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
    MAGA_CHECK(found == cudaDriverEntryPointSuccess && function, "the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  cuuint64_t bytes[4];
  for (cuuint32_t i = 0; i + 1 < shape.rank; ++i) bytes[i] = shape.strides[i] * elements.bytes;
  const cuuint32_t every[5] = {1, 1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = encode_tiled(&map, elements.type, shape.rank, const_cast<void*>(data), shape.sizes, bytes, shape.box,
                                       every, CU_TENSOR_MAP_INTERLEAVE_NONE, elements.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                       CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  MAGA_CHECK(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled: ", static_cast<int>(result), ", rank ", shape.rank, ", ",
             shape.sizes[0], " columns, ", shape.sizes[1], " rows, stride ", shape.strides[0]);
  return map;
}

}  // namespace

CUtensorMap tensor_map(DType type, const void* data, const TensorShape& shape) {
  const auto elements = type == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return encode({elements, 2, CU_TENSOR_MAP_SWIZZLE_128B}, data, shape);
}

CUtensorMap word_map(const void* data, const TensorShape& shape) {
  return encode({CU_TENSOR_MAP_DATA_TYPE_INT64, 8, CU_TENSOR_MAP_SWIZZLE_NONE}, data, shape);
}

}  // namespace maga::cuda
