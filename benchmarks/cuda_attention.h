// A made-up step with its pages, shared by the checks and the timings of cuda_attention.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "backends/cuda/attention.h"
#include "backends/cuda/cuda_check.h"
#include "program/program.h"

namespace maga::cuda {

// Device memory.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t count) : count_(count) {
    MAGA_CUDA(cudaMalloc(&data_, bytes() + 16));
    fill(0xff);  // NaN in every floating type
  }
  explicit DeviceArray(const std::vector<T>& from) : DeviceArray(from.size()) { upload(from); }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  T* get() const { return data_; }
  size_t bytes() const { return count_ * sizeof(T); }
  void fill(int byte) { MAGA_CUDA(cudaMemset(data_, byte, bytes() + 16)); }
  void upload(const std::vector<T>& from) {
    MAGA_CUDA(cudaMemcpy(data_, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  std::vector<T> download() const {
    std::vector<T> to(count_);
    MAGA_CUDA(cudaMemcpy(to.data(), data_, bytes(), cudaMemcpyDeviceToHost));
    return to;
  }

 private:
  size_t count_;
  T* data_ = nullptr;
};

struct SequenceSize {
  int tokens = 0, kv_length = 0;
};

struct StepSizes {
  std::vector<SequenceSize> sequences;
  int padding_tokens = 0, padding_sequences = 0;
  int page_tokens = 16;
};

// The step on host and device. Page ids are a random choice of the pool's pages.
class MadeStep {
 public:
  MadeStep(const StepSizes& shape, int64_t pool_pages, bool tree, std::mt19937& random);
  int64_t pages_used() const { return static_cast<int64_t>(pages.size()); }

  std::vector<int32_t> ids, positions, sequence_start, kv_length, page_start, pages, token_sequence;
  std::vector<int64_t> slots;
  std::vector<uint64_t> tree_mask;
  Step host;          // without the padding
  DeviceStep device;  // with it

 private:
  std::vector<std::unique_ptr<DeviceArray<int32_t>>> arrays_;
  std::unique_ptr<DeviceArray<int64_t>> slots_;
  std::unique_ptr<DeviceArray<uint64_t>> masks_;
};

// A layer in pages that begin at `pool`, `before` bytes from the start of each page. Sets the strides to what such a page is with
// `rest` bytes of other layers.
struct PageBytes {
  int64_t before = 0, rest = 0;
};
KvLayer layer_in(void* pool, const AttentionShape& shape, DType kv_type, int page_tokens, PageBytes other);
int64_t page_bytes_of(const AttentionShape& shape, DType kv_type, int page_tokens, PageBytes other);

// Kernels of the benchmark, on the default stream.
void fill_random(void* to, DType type, size_t count, uint32_t seed);
// The entries of the step's keys and values; the rest of the pages stays as it was.
void fill_pages(const KvLayer& layer, DType type, const DeviceStep& step, uint32_t seed);
// The entries of the step's own tokens, from pages of `kv_type` to rows of k and v; padding rows stay as they were.
void copy_own_keys(void* k, void* v, int64_t k_stride, int64_t v_stride, DType type, const KvLayer& layer, DType kv_type,
                   const DeviceStep& step);
// out (tokens, heads * v_dim) in double precision, by definition.
void attention_reference(double* out, DType type, DType kv_type, const AttentionShape& shape, const DeviceStep& step,
                         const AttentionArgs& args);

int check_attention(bool few);
// Of decode with one batch size and context, or of all that the benchmark has.
void time_attention(int only_batch, int only_context);

}  // namespace maga::cuda
