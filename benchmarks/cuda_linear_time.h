// What the programs that time CUDA linears share: the matrices of Llama-3-8B, a stopwatch over graphs, the command line.
#pragma once

#include <array>
#include <functional>
#include <string>
#include <vector>

#include "cuda_linear.h"

namespace maga::bench {

constexpr double kBytesPerUs = 4.51e6;  // what an H200 reads at

struct Matrix {
  const char* name;
  int n, k;  // gated: 2 n rows
  bool gated, split;
  bool f32 = false;
  int64_t rows() const { return int64_t{n} * (gated ? 2 : 1); }
};
using Matrices = std::array<Matrix, 5>;  // qkv, o, gate_up, down, head
constexpr Matrices kLlama3_8B = {{{"qkv", 6144, 4096, false, true},
                                  {"o", 4096, 4096, false, true},
                                  {"gate_up", 14336, 4096, true, false},
                                  {"down", 4096, 14336, false, true},
                                  {"head", 128256, 4096, false, false, true}}};

class Stopwatch {
 public:
  Stopwatch();
  // Microseconds of each graph: the median of five timings, which take turns, as busy matrix units lower the clock for what
  // follows.
  std::vector<double> us(cudaStream_t stream, const std::vector<std::function<void()>>& works) const;
  double us(cudaStream_t stream, const std::function<void()>& work) const { return us(stream, std::vector{work})[0]; }

 private:
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

cudaStream_t make_stream();

// Takes --libraries FOLDER, where to look for cuBLASLt first, from the command line and hands on its other words, of which there
// are two at most. `run` returns the exit status, or -1 for words that it does not know.
int run_program(int count, char** words, const char* usage,
                const std::function<int(const std::string& mode, const std::string& more)>& run);

}  // namespace maga::bench
