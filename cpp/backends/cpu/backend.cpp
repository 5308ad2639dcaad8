// What the engine sees of the CPU: packing, loading, and how it describes itself.
#include "backends/cpu/backend.h"

#include "backends/cpu/executable.h"
#include "backends/cpu/vector_weight.h"
#include "backends/cpu/weight.h"

namespace maga::cpu {

CpuBackend::CpuBackend(const CpuOptions& options)
    : device_(new Device{ThreadPool(options.threads), parse_isa(options.isa), options.quantize_activations}) {}

std::string CpuBackend::describe() const {
  const int threads = device_->threads.size();
  return concat("cpu, ", name_of(device_->isa), ", ", threads, threads == 1 ? " thread" : " threads",
                device_->quantize_activations ? "" : ", exact fp32");
}

FusedOps CpuBackend::fused_ops() const { return {.linear_residual = true, .gated_linear = true, .prepare_qkv = true}; }

std::shared_ptr<const Weight> CpuBackend::pack(const WeightSpec& spec, const Canonical& weight) {
  if (spec.shape.size() == 1) return pack_vector(spec, weight);
  return pack_matrix(spec, weight);
}

std::unique_ptr<WeightStack> CpuBackend::stack(const WeightSpec& spec) { return std::make_unique<PackedStack>(spec); }

std::unique_ptr<Executable> CpuBackend::load(const Program& program, std::vector<std::shared_ptr<const Weight>> weights,
                                             const Limits& limits) {
  program.validate();
  return std::make_unique<CpuExecutable>(device_, fuse(program, fused_ops()), std::move(weights), limits);
}

}  // namespace maga::cpu

namespace maga {

std::shared_ptr<Backend> make_cpu_backend(const CpuOptions& options) { return std::make_shared<cpu::CpuBackend>(options); }

}  // namespace maga
