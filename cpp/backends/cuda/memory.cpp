#include "backends/cuda/memory.h"

#include <atomic>

#include "backends/cuda/cuda_check.h"

namespace maga::cuda {

namespace {

std::atomic<int64_t> device_bytes{0};

}  // namespace

void use_device(int device) { MAGA_CUDA(cudaSetDevice(device)); }

template <>
DeviceMemory::Memory(int64_t bytes, const char* purpose) : bytes_(bytes) {
  if (bytes == 0) return;
  const cudaError_t error = cudaMalloc(reinterpret_cast<void**>(&data_), static_cast<size_t>(bytes));
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // not an error that stays
    size_t free = 0, total = 0;
    MAGA_CUDA(cudaMemGetInfo(&free, &total));
    throw Error(ErrorKind::invalid, concat("the GPU has no room for ", purpose, ": ", bytes >> 20, " MiB are needed, ", free >> 20,
                                           " of ", total >> 20, " MiB are free"));
  }
  MAGA_CUDA(error);
  device_bytes += bytes;
}

template <>
DeviceMemory::~Memory() {
  if (data_ == nullptr) return;
  cudaFree(data_);
  device_bytes -= bytes_;
}

int64_t all_device_bytes() { return device_bytes; }

template <>
PinnedMemory::Memory(int64_t bytes, const char* purpose) : bytes_(bytes) {
  if (bytes == 0) return;
  const cudaError_t error = cudaHostAlloc(reinterpret_cast<void**>(&data_), static_cast<size_t>(bytes), cudaHostAllocPortable);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    throw Error(ErrorKind::invalid, concat("the host cannot lock ", bytes >> 20, " MiB of memory for ", purpose));
  }
  MAGA_CUDA(error);
}

template <>
PinnedMemory::~Memory() {
  cudaFreeHost(data_);
}

}  // namespace maga::cuda
