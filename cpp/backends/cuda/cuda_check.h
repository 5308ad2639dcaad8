// MAGA_CUDA(call): a CUDA call that fails throws, naming the call and the error.
#pragma once

#include <cuda_runtime_api.h>

#include "core/check.h"

#define MAGA_CUDA(call)                                                                                                           \
  do {                                                                                                                            \
    if (const cudaError_t cuda_error_ = (call); cuda_error_ != cudaSuccess) [[unlikely]]                                          \
      throw ::maga::Error(::maga::ErrorKind::internal,                                                                            \
                          ::maga::concat("CUDA: ", cudaGetErrorString(cuda_error_), " (", cudaGetErrorName(cuda_error_), ") in ", \
                                         #call, ", ", __FILE__, ":", __LINE__));                                                  \
  } while (false)
