// Linears through cuBLASLt: any number of tokens, any type, any alignment.
#pragma once

#include <map>

#include "backends/cuda/cublaslt.h"
#include "backends/cuda/linear.h"
#include "backends/cuda/linear_measure.h"

namespace maga::cuda {

constexpr size_t kGemmWorkspaceBytes = 64 << 20;

class Gemms {
 public:
  Gemms();
  ~Gemms();
  Gemms(const Gemms&) = delete;

  // out = x · weightᵀ (+ bias) (+ residual). `args.gated` and `args.slabs` are not looked at. The first calls of a kind for more
  // than 64 tokens, outside a graph capture, time a few algorithms and wait for the device.
  void run(const Queue& queue, const LinearArgs& args, void* workspace);

 private:
  // What makes cuBLASLt choose differently.
  struct Key {
    int m = 0;  // rounded up, see bucket_of
    int n = 0, k = 0;
    DType type{}, out_type{};
    bool bias = false, residual = false;
    int64_t x_stride = 0, out_stride = 0, residual_stride = 0;
    uint32_t weight_alignment = 0, x_alignment = 0, out_alignment = 0, residual_alignment = 0;
    auto operator<=>(const Key&) const = default;
  };
  struct Plan;

  Plan& plan_of(const Key& key);
  lt::Status multiply(cudaStream_t stream, Plan& plan, const LinearArgs& args, void* out, void* workspace);
  void measure(cudaStream_t stream, Plan& plan, const LinearArgs& args, void* workspace);

  lt::Handle handle_ = nullptr;
  std::map<Key, Plan> plans_;
  Stopwatch stopwatch_;
};

}  // namespace maga::cuda
