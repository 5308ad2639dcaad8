#include "backends/cuda/linear_measure.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "backends/cuda/cuda_check.h"

namespace maga::cuda {

bool worth_measuring(int m) {
  if (m <= 512) return m > 64 && m % 16 == 0;
  return m <= 1024 ? m % 128 == 0 : std::has_single_bit(static_cast<unsigned>(m));
}

bool capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  MAGA_CUDA(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

Temporary::Temporary(size_t bytes) {
  if (cudaMalloc(&data, bytes) != cudaSuccess) data = nullptr, cudaGetLastError();
}
Temporary::~Temporary() { cudaFree(data); }

Stopwatch::Stopwatch() {
  MAGA_CUDA(cudaEventCreate(&begin_));
  MAGA_CUDA(cudaEventCreate(&end_));
}
Stopwatch::~Stopwatch() {
  cudaEventDestroy(begin_);
  cudaEventDestroy(end_);
}

size_t Stopwatch::fastest(cudaStream_t stream, void* flushed, size_t bytes, size_t count, const std::function<bool(size_t)>& run) {
  constexpr int kRepeats = 4;
  std::vector<float> least(count, std::numeric_limits<float>::infinity());
  for (int repeat = 0; repeat <= kRepeats; ++repeat)
    for (size_t i = 0; i < count; ++i) {
      MAGA_CUDA(cudaMemsetAsync(flushed, 0, bytes, stream));
      MAGA_CUDA(cudaEventRecord(begin_, stream));
      const bool works = run(i);
      MAGA_CUDA(cudaEventRecord(end_, stream));
      MAGA_CUDA(cudaEventSynchronize(end_));
      if (!works || repeat == 0) continue;  // the first time loads the kernel
      float ms = 0;
      MAGA_CUDA(cudaEventElapsedTime(&ms, begin_, end_));
      least[i] = std::min(least[i], ms);
    }
  return static_cast<size_t>(std::ranges::min_element(least) - least.begin());
}

}  // namespace maga::cuda
