// What the core calls in the CUDA library.
#pragma once

#include "backends/backend.h"

namespace maga::cuda {

struct Entry {
  int version;
  std::shared_ptr<Backend> (*make_backend)(const CudaOptions&);
  std::vector<CudaDevice> (*devices)(std::string* why);
};

constexpr int kEntryVersion = 1;
constexpr const char* kEntryName = "maga_cuda_entry";

}  // namespace maga::cuda
