// How every kernel of this backend is launched and how failures become exceptions.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "backends/cuda/cuda_check.h"
#include "backends/cuda/queue.h"

namespace maga::cuda {

// Launches on the queue. With queue.overlap the kernel may start before the one in front of it is done (programmatic dependent
// launch, sm_90): every kernel calls allow_next() early, and wait_for_previous() before it touches anything another kernel
// writes or reads.
template <typename... Parameters, typename... Arguments>
void launch(const Queue& queue, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
            Arguments&&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = queue.stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = queue.overlap ? 1 : 0;
  MAGA_CUDA(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...));
}

__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void allow_next() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace maga::cuda
