// What the checks and timings of the CUDA row kernels share: device memory, typed matrices with poison around them, graph timing.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backends/cuda/cuda_check.h"
#include "backends/cuda/rows.h"
#include "backends/cuda/sample.h"
#include "core/dtype.h"
#include "core/rng.h"

namespace maga::bench {

using cuda::Matrix;
using cuda::Queue;

class Buffer {
 public:
  explicit Buffer(size_t bytes) : bytes_(bytes) { MAGA_CUDA(cudaMalloc(&data_, bytes)); }
  template <typename T>
  explicit Buffer(const std::vector<T>& host) : Buffer(std::max<size_t>(1, host.size() * sizeof(T))) {
    MAGA_CUDA(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;

  template <typename T = void>
  T* get() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }
  template <typename T>
  std::vector<T> download() const {
    std::vector<T> host(bytes_ / sizeof(T));
    MAGA_CUDA(cudaDeviceSynchronize());
    MAGA_CUDA(cudaMemcpy(host.data(), data_, host.size() * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

// Numbers from the counter-based generator of the core: the same in every run.
class Random {
 public:
  explicit Random(uint64_t seed) : seed_(seed) {}
  double unit() { return uniform(seed_, 1, next_++); }
  float between(double low, double high) { return static_cast<float>(low + (high - low) * unit()); }
  float gaussian(double sigma) {
    return static_cast<float>(sigma * std::sqrt(-2 * std::log(1 - unit())) * std::cos(6.283185307179586 * unit()));
  }
  int below(int n) { return static_cast<int>(unit() * n); }

 private:
  uint64_t seed_, next_ = 0;
};

std::vector<uint8_t> encode(DType type, const std::vector<float>& values);
std::vector<float> decode(DType type, const std::vector<uint8_t>& bytes);
float round_to(DType type, double value);
// Half a unit in the last place, relative.
constexpr double half_ulp(DType type) { return type == DType::bf16 ? 1.0 / 256 : type == DType::f16 ? 1.0 / 2048 : 6e-8; }

constexpr uint8_t kPoison = 0xff;  // NaN in every type

// Columns of a wider value, with poison around them.
class View {
 public:
  View(DType type, int64_t rows, int width, int64_t stride, int64_t offset);
  void fill(Random& random, double range);  // values that `type` holds
  void set(const std::vector<float>& values);
  Matrix matrix() const;
  const std::vector<float>& values() const { return values_; }
  float at(int64_t row, int column) const { return values_[row * width_ + column]; }
  // Reads the columns back; false if anything around them is not poison any more.
  bool read();

 private:
  std::vector<size_t> places() const;
  DType type_;
  int64_t rows_, width_, stride_, offset_;
  Buffer buffer_;
  std::vector<float> values_;  // (rows, width)
};

// Counts what was checked, and prints what was wrong.
struct Report {
  int64_t cases = 0, wrong = 0;
  double worst = 0;  // error as a share of what is allowed
  void expect(bool right, const std::string& what) {
    ++cases;
    if (!right && ++wrong <= 20) std::printf("WRONG %s\n", what.c_str());
  }
};

void check_rows(Report& report, bool small);
void check_sample(Report& report, bool small);

// Median microseconds of one of `launches` launches in a graph.
double graph_us(int launches, bool overlap, const std::function<void(const Queue&, int)>& body);
void fill_random(const Buffer& buffer, DType type, float range);

}  // namespace maga::bench
