// The CUDA backend is a library of its own, so that one install serves machines with and without a GPU. It is opened when asked
// for.
#include <dlfcn.h>

#include <filesystem>

#include "backends/backend.h"
#include "backends/cuda/entry.h"

namespace maga {
namespace {

constexpr const char* kLibrary = "libmaga_cuda.so";

std::string beside_core() {
  Dl_info info{};
  MAGA_CHECK(dladdr(reinterpret_cast<const void*>(&make_cuda_backend), &info) != 0 && info.dli_fname, "where does the core lie?");
  return (std::filesystem::path(info.dli_fname).parent_path() / kLibrary).string();
}

struct Library {
  const cuda::Entry* entry = nullptr;
  std::string error;
};

const Library& library() {
  static const Library opened = [] {
    Library result;
    const std::string path = beside_core();
    if (!std::filesystem::exists(path)) {
      result.error =
          concat("this build has no CUDA backend (", path, " does not exist): install from source on a machine with nvcc");
      return result;
    }
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
      result.error = concat("the CUDA backend cannot be opened: ", dlerror());
      return result;
    }
    const auto entry = reinterpret_cast<const cuda::Entry* (*)()>(dlsym(handle, cuda::kEntryName));
    if (!entry || entry()->version != cuda::kEntryVersion)
      result.error = concat(path, " belongs to another version of this package: reinstall it");
    else
      result.entry = entry();
    return result;
  }();
  return opened;
}

}  // namespace

std::shared_ptr<Backend> make_cuda_backend(const CudaOptions& options) {
  const Library& lib = library();
  if (!lib.entry) throw Error(ErrorKind::missing, lib.error);
  return lib.entry->make_backend(options);
}

std::vector<CudaDevice> cuda_devices(std::string* why) {
  const Library& lib = library();
  if (lib.entry) return lib.entry->devices(why);
  if (why) *why = lib.error;
  return {};
}

}  // namespace maga
