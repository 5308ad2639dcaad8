// Times several ways to compute one linear, to keep the fastest.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <vector>

namespace maga::cuda {

// Which numbers of tokens are worth the time that measuring takes: the batches of captured graphs and the sizes at which an
// executable warms up. Below 65 weights alone decide; other sizes come once, or rarely.
bool worth_measuring(int m);
bool capturing(cudaStream_t stream);

// Memory for one measurement.
struct Temporary {
  explicit Temporary(size_t bytes);
  ~Temporary();
  Temporary(const Temporary&) = delete;
  void* data = nullptr;  // null: there was none to spare
};

class Stopwatch {
 public:
  Stopwatch();
  ~Stopwatch();
  Stopwatch(const Stopwatch&) = delete;
  // Calls run(i) for each i below `count` a few times and returns the i of least time; run(i) is false if that way does not work.
  // `flushed` bytes are overwritten before each: a step finds its weights in memory, not in the L2. Waits for the device.
  size_t fastest(cudaStream_t stream, void* flushed, size_t bytes, size_t count, const std::function<bool(size_t)>& run);

 private:
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

}  // namespace maga::cuda
