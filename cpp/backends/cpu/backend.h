// The CPU: own kernels, one set an instruction set, on a pool of pinned threads.
#pragma once

#include "backends/backend.h"
#include "backends/cpu/isa.h"
#include "core/threads.h"

namespace maga::cpu {

// What executables share with the backend that made them.
struct Device {
  ThreadPool threads;
  Isa isa;
  bool quantize_activations;
};

class CpuBackend : public Backend {
 public:
  explicit CpuBackend(const CpuOptions& options);

  std::string describe() const override;
  FusedOps fused_ops() const override;
  ThreadPool& threads() override { return device_->threads; }
  std::shared_ptr<const Weight> pack(const WeightSpec& spec, const Canonical& weight) override;
  std::unique_ptr<WeightStack> stack(const WeightSpec& spec) override;
  std::unique_ptr<Executable> load(const Program& program, std::vector<std::shared_ptr<const Weight>> weights,
                                   const Limits& limits) override;

 private:
  std::shared_ptr<Device> device_;
};

}  // namespace maga::cpu
