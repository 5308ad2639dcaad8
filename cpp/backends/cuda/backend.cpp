#include "backends/cuda/backend.h"

#include <algorithm>

#include "backends/cuda/cublaslt.h"
#include "backends/cuda/cuda_check.h"
#include "backends/cuda/entry.h"
#include "backends/cuda/executable.h"

namespace maga::cuda {
namespace {

constexpr int kUploadLanes = 8;
// Host threads for sampling between steps; more than this fight the server for cores.
constexpr int kMostThreads = 8;

std::string unusable(const CudaDevice& device, DType compute) {
  if (device.capability < 75) return concat(device.name, " is sm_", device.capability, ": sm_75 and newer are supported");
  if (device.capability < 80 && compute == DType::bf16)
    return concat(device.name, " is sm_", device.capability, " and has no bf16: use fp16");
  return "";
}

// A multiplication and an addition are two; of 16-bit numbers, summed in fp32, not sparse.
double flops_per_cycle_and_sm(int capability) {
  return capability >= 100 ? 8192 : capability >= 90 ? 4096 : capability == 80 ? 2048 : 1024;
}

std::vector<CudaDevice> devices(std::string* why) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    cudaGetLastError();
    int driver = 0;  // as 13000 for 13.0
    cudaDriverGetVersion(&driver);
    if (!why) return {};
    if (error == cudaErrorInsufficientDriver)
      *why = driver == 0 ? std::string("no NVIDIA driver is installed")
                         : concat("the NVIDIA driver is for CUDA ", driver / 1000, ".", driver % 1000 / 10, ", this build needs ",
                                  CUDART_VERSION / 1000);
    else
      *why = error == cudaSuccess ? "no NVIDIA GPU was found" : concat("no usable NVIDIA GPU: ", cudaGetErrorString(error));
    return {};
  }
  std::vector<CudaDevice> found;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    MAGA_CUDA(cudaGetDeviceProperties(&properties, i));
    size_t free = 0, total = properties.totalGlobalMem;
    int before = 0;
    if (cudaGetDevice(&before) == cudaSuccess && cudaSetDevice(i) == cudaSuccess) cudaMemGetInfo(&free, &total);
    cudaSetDevice(before);
    cudaGetLastError();
    const auto attribute = [&](cudaDeviceAttr which) {
      int value = 0;
      MAGA_CUDA(cudaDeviceGetAttribute(&value, which, i));
      return static_cast<double>(value);
    };
    const int capability = properties.major * 10 + properties.minor;
    found.push_back(
        {.name = properties.name,
         .total_bytes = static_cast<int64_t>(total),
         .free_bytes = static_cast<int64_t>(free),
         .capability = capability,
         .bytes_per_second = 2e3 * attribute(cudaDevAttrMemoryClockRate) * attribute(cudaDevAttrGlobalMemoryBusWidth) / 8,
         .flops_per_second = 1e3 * attribute(cudaDevAttrClockRate) * attribute(cudaDevAttrMultiProcessorCount) *
                             flops_per_cycle_and_sm(capability)});
  }
  return found;
}

}  // namespace

Device::Device(const CudaOptions& options)
    : id(options.device),
      compute(options.compute),
      memory_utilization(options.memory_utilization),
      threads(std::min(kMostThreads, usable_cores())) {
  MAGA_REQUIRE(compute == DType::f32 || compute == DType::f16 || compute == DType::bf16,
               "the CUDA backend computes in fp32, fp16 or bf16, not ", name_of(compute));
  MAGA_REQUIRE(memory_utilization > 0 && memory_utilization <= 1, "memory utilization is ", memory_utilization,
               ": it must be in (0, 1]");
  std::string why;
  const std::vector<CudaDevice> all = devices(&why);
  if (all.empty()) throw Error(ErrorKind::missing, why);
  MAGA_REQUIRE(id >= 0 && id < static_cast<int>(all.size()), "GPU ", id, " was asked for, but there ",
               all.size() == 1 ? "is only GPU 0" : concat("are only GPUs 0 to ", all.size() - 1));
  const CudaDevice& card = all[id];
  const std::string reason = unusable(card, compute);
  MAGA_REQUIRE(reason.empty(), reason);
  name = card.name;
  capability = card.capability;
  total_bytes = card.total_bytes;
  use_device(id);
  for (const std::string& folder : options.library_folders) lt::add_library_folder(folder);
  uploader = std::make_unique<Uploader>(kUploadLanes, compute, capability);
  linears = std::make_unique<Linears>();
}

std::string CudaBackend::describe() const {
  return concat(device_->name, ", sm_", device_->capability, ", ", name_of(device_->compute));
}

std::shared_ptr<const Weight> CudaBackend::pack(const WeightSpec& spec, const Canonical& weight) {
  use_device(device_->id);
  return device_->uploader->upload(spec, weight);
}

std::unique_ptr<WeightStack> CudaBackend::stack(const WeightSpec& spec) {
  use_device(device_->id);
  return device_->uploader->stack(spec, device_->id);
}

std::unique_ptr<Executable> CudaBackend::load(const Program& program, std::vector<std::shared_ptr<const Weight>> weights,
                                              const Limits& limits) {
  use_device(device_->id);
  program.validate();
  return std::make_unique<CudaExecutable>(device_, fuse(program, fused_ops()), std::move(weights), limits);
}

}  // namespace maga::cuda

extern "C" __attribute__((visibility("default"))) const maga::cuda::Entry* maga_cuda_entry() {
  static const maga::cuda::Entry entry{
      .version = maga::cuda::kEntryVersion,
      .make_backend = [](const maga::CudaOptions& options) -> std::shared_ptr<maga::Backend> {
        return std::make_shared<maga::cuda::CudaBackend>(options);
      },
      .devices = maga::cuda::devices,
  };
  return &entry;
}
