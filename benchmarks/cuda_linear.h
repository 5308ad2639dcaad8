// What the check and the timing of the CUDA linears share: device memory, random values, graphs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "backends/cuda/cuda_check.h"
#include "backends/cuda/linear.h"

namespace maga::bench {

class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t bytes) : bytes_(bytes) { MAGA_CUDA(cudaMalloc(&data_, bytes)); }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  void* at(int64_t bytes = 0) const { return static_cast<char*>(data_) + bytes; }
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

__host__ __device__ inline uint32_t hash(uint64_t index, uint32_t seed) {
  uint32_t h = static_cast<uint32_t>(index) * 0x9E3779B1u ^ static_cast<uint32_t>(index >> 32) * 0x85EBCA77u ^ seed * 0xC2B2AE3Du;
  h ^= h >> 15, h *= 0x2C1B3C6Du, h ^= h >> 12, h *= 0x297A2D39u, h ^= h >> 15;
  return h;
}

// In [-1, 1).
__host__ __device__ inline float uniform(int64_t i, uint32_t seed) {
  return static_cast<float>(hash(i, seed) >> 8) * (2.f / 16777216.f) - 1.f;
}

// Uniform in [-scale, scale), some of them times `outlier`.
void fill(DType type, void* data, int64_t count, float scale, uint32_t seed, float outlier = 1);

class Graph {
 public:
  Graph(cudaStream_t stream, const std::function<void()>& work) {
    cudaGraph_t graph;
    MAGA_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    work();
    MAGA_CUDA(cudaStreamEndCapture(stream, &graph));
    MAGA_CUDA(cudaGraphInstantiate(&graph_, graph, 0));
    MAGA_CUDA(cudaGraphDestroy(graph));
  }
  ~Graph() { cudaGraphExecDestroy(graph_); }
  Graph(const Graph&) = delete;
  void launch(cudaStream_t stream) const { MAGA_CUDA(cudaGraphLaunch(graph_, stream)); }

 private:
  cudaGraphExec_t graph_ = nullptr;
};

// Prints the number of cases and failures; returns the failures. `small`: few and small cases, for compute-sanitizer; `only_tiles`:
// the tiled kernels alone.
int check_linears(cudaStream_t stream, bool small, bool only_tiles);

}  // namespace maga::bench
