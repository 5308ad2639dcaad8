// Streams, events and graphs, owned.
#pragma once

#include <cuda_runtime_api.h>

#include <utility>

#include "backends/cuda/cuda_check.h"

namespace maga::cuda {

class Stream {
 public:
  Stream() { MAGA_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

class Event {
 public:
  explicit Event(bool timed = false) {
    MAGA_CUDA(cudaEventCreateWithFlags(&event_, timed ? cudaEventDefault : cudaEventDisableTiming));
  }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

class Graph {
 public:
  Graph() = default;
  // What `body` queues on the stream, to be launched again and again.
  template <typename Body>
  Graph(cudaStream_t stream, Body&& body) {
    cudaGraph_t graph = nullptr;
    MAGA_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    try {
      body();
    } catch (...) {
      cudaStreamEndCapture(stream, &graph);
      cudaGetLastError();
      cudaGraphDestroy(graph);
      throw;
    }
    MAGA_CUDA(cudaStreamEndCapture(stream, &graph));
    const cudaError_t error = cudaGraphInstantiate(&exec_, graph, 0);
    cudaGraphDestroy(graph);
    MAGA_CUDA(error);
  }
  ~Graph() {
    if (exec_) cudaGraphExecDestroy(exec_);
  }
  Graph(Graph&& other) noexcept : exec_(std::exchange(other.exec_, nullptr)) {}
  Graph& operator=(Graph&& other) noexcept {
    std::swap(exec_, other.exec_);
    return *this;
  }
  void launch(cudaStream_t stream) const { MAGA_CUDA(cudaGraphLaunch(exec_, stream)); }

 private:
  cudaGraphExec_t exec_ = nullptr;
};

}  // namespace maga::cuda
