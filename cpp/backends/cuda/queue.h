// Where kernels go: a stream, and whether neighbours may overlap.
#pragma once

#include <cuda_runtime_api.h>

namespace maga::cuda {

struct Queue {
  cudaStream_t stream = nullptr;
  bool overlap = false;  // programmatic dependent launch, from sm_90 on
};

}  // namespace maga::cuda
