// One card: what its executables share.
#pragma once

#include <memory>

#include "backends/backend.h"
#include "backends/cuda/linear.h"
#include "backends/cuda/upload.h"
#include "core/threads.h"

namespace maga::cuda {

struct Device {
  explicit Device(const CudaOptions& options);

  int id;
  DType compute;
  double memory_utilization;
  std::string name;
  int capability = 0;       // 90: sm_90
  int64_t total_bytes = 0;  // of the card
  ThreadPool threads;       // host work between steps
  std::unique_ptr<Uploader> uploader;
  std::unique_ptr<Linears> linears;
};

class CudaBackend : public Backend {
 public:
  explicit CudaBackend(const CudaOptions& options) : device_(std::make_shared<Device>(options)) {}
  std::string describe() const override;
  FusedOps fused_ops() const override { return {.linear_residual = true, .gated_linear = true, .prepare_qkv = true}; }
  ThreadPool& threads() override { return device_->threads; }
  std::shared_ptr<const Weight> pack(const WeightSpec& spec, const Canonical& weight) override;
  std::unique_ptr<WeightStack> stack(const WeightSpec& spec) override;
  std::unique_ptr<Executable> load(const Program& program, std::vector<std::shared_ptr<const Weight>> weights,
                                   const Limits& limits) override;

 private:
  std::shared_ptr<Device> device_;
};

}  // namespace maga::cuda
