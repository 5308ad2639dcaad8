#include "cuda_linear_time.h"

#include <cstdio>
#include <cstring>
#include <memory>

#include "backends/cuda/cublaslt.h"

namespace maga::bench {

Stopwatch::Stopwatch() {
  MAGA_CUDA(cudaEventCreate(&begin_));
  MAGA_CUDA(cudaEventCreate(&end_));
}

std::vector<double> Stopwatch::us(cudaStream_t stream, const std::vector<std::function<void()>>& works) const {
  constexpr int kTimings = 5;
  std::vector<std::unique_ptr<Graph>> graphs;
  for (const auto& work : works) {
    graphs.push_back(std::make_unique<Graph>(stream, work));
    graphs.back()->launch(stream);
  }
  std::vector<std::vector<double>> times(works.size());
  for (int i = 0; i < kTimings; ++i)
    for (size_t g = 0; g < graphs.size(); ++g) {
      float ms = 0;
      MAGA_CUDA(cudaEventRecord(begin_, stream));
      graphs[g]->launch(stream);
      MAGA_CUDA(cudaEventRecord(end_, stream));
      MAGA_CUDA(cudaStreamSynchronize(stream));
      MAGA_CUDA(cudaEventElapsedTime(&ms, begin_, end_));
      times[g].push_back(ms * 1e3);
    }
  std::vector<double> medians;
  for (std::vector<double>& of : times) {
    std::ranges::sort(of);
    medians.push_back(of[kTimings / 2]);
  }
  return medians;
}

cudaStream_t make_stream() {
  cudaStream_t stream;
  MAGA_CUDA(cudaStreamCreate(&stream));
  return stream;
}

int run_program(int count, char** words, const char* usage,
                const std::function<int(const std::string& mode, const std::string& more)>& run) {
  try {
    std::vector<std::string> rest;
    for (int i = 1; i < count; ++i) {
      if (std::strcmp(words[i], "--libraries") == 0 && i + 1 < count)
        cuda::lt::add_library_folder(words[++i]);
      else
        rest.push_back(words[i]);
    }
    const size_t given = rest.size();
    rest.resize(2);
    const int status = given <= 2 ? run(rest[0], rest[1]) : -1;
    if (status >= 0) return status;
    std::fprintf(stderr, "usage: %s  [--libraries FOLDER]\n", usage);
    return 2;
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

}  // namespace maga::bench
