// Finds libcublasLt: in the process, on the loader's path, in pip's nvidia wheels beside this package, in the CUDA toolkit.
#include "backends/cuda/cublaslt.h"

#include <dlfcn.h>

#include <filesystem>
#include <mutex>
#include <utility>
#include <vector>

#include "core/check.h"

namespace maga::cuda::lt {
namespace {

constexpr size_t kOldest = 120000;  // 12.0: the first that knows sm_90
constexpr const char* kNames[] = {"libcublasLt.so.13", "libcublasLt.so.12"};

std::mutex g_mutex;  // guards the folders
std::vector<std::string>& folders() {
  static std::vector<std::string> list;
  return list;
}

// Where pip puts nvidia's wheels: <site-packages>/nvidia, beside <site-packages>/maga_transformer/<this library>.
std::vector<std::string> usual_folders() {
  std::vector<std::string> list;
  Dl_info self;
  if (dladdr(reinterpret_cast<const void*>(&usual_folders), &self) && self.dli_fname) {
    std::error_code ignored;
    const auto path = std::filesystem::weakly_canonical(self.dli_fname, ignored);
    const auto packages = path.parent_path().parent_path();
    for (const char* folder : {"nvidia/cu13/lib", "nvidia/cublas/lib"}) list.push_back((packages / folder).string());
  }
  list.push_back("/usr/local/cuda/lib64");
  list.push_back("/usr/local/cuda/targets/x86_64-linux/lib");
  return list;
}

template <typename Function>
void find(void* handle, const char* name, Function& function) {
  void* const symbol = dlsym(handle, name);
  if (!symbol) throw Error(ErrorKind::missing, concat("libcublasLt has no ", name, ": it is not a cuBLASLt that we know"));
  function = reinterpret_cast<Function>(symbol);
}

void* open_any() {
  std::string tried;
  auto open = [&](const std::string& path, int flags) {
    void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | flags);
    if (!handle && !flags) tried += (tried.empty() ? "" : ", ") + path;
    return handle;
  };
  std::vector<std::string> places;
  {
    const std::lock_guard lock(g_mutex);
    places = folders();
  }
  for (std::string& folder : usual_folders()) places.push_back(std::move(folder));
  for (const char* name : kNames) {
    // One that the process already has, torch's perhaps, serves both.
    if (void* const handle = open(name, RTLD_NOLOAD)) return handle;
    if (void* const handle = open(name, 0)) return handle;
    for (const std::string& folder : places)
      if (void* const handle = open(folder + "/" + name, 0)) return handle;
  }
  throw Error(ErrorKind::missing,
              concat("the CUDA backend needs cuBLASLt, and none was found; install it with `pip install nvidia-cublas` or put the "
                     "folder of libcublasLt.so.13 on LD_LIBRARY_PATH. Tried: ",
                     tried));
}

Library open() {
  void* const handle = open_any();
  Library library{};
  find(handle, "cublasLtGetVersion", library.version);
  if (library.version() < kOldest) {
    Dl_info where;
    const bool known = dladdr(reinterpret_cast<const void*>(library.version), &where) && where.dli_fname;
    throw Error(ErrorKind::missing,
                concat("cuBLASLt ", library.version(), " (", known ? where.dli_fname : "libcublasLt", ") is too old, ", kOldest,
                       " is needed; install a newer one with `pip install nvidia-cublas`"));
  }
  find(handle, "cublasLtGetStatusName", library.status_name);
  find(handle, "cublasLtCreate", library.create);
  find(handle, "cublasLtDestroy", library.destroy);
  find(handle, "cublasLtMatmulDescCreate", library.operation_create);
  find(handle, "cublasLtMatmulDescDestroy", library.operation_destroy);
  find(handle, "cublasLtMatmulDescSetAttribute", library.operation_set);
  find(handle, "cublasLtMatrixLayoutCreate", library.layout_create);
  find(handle, "cublasLtMatrixLayoutDestroy", library.layout_destroy);
  find(handle, "cublasLtMatrixLayoutSetAttribute", library.layout_set);
  find(handle, "cublasLtMatmulPreferenceCreate", library.preference_create);
  find(handle, "cublasLtMatmulPreferenceDestroy", library.preference_destroy);
  find(handle, "cublasLtMatmulPreferenceSetAttribute", library.preference_set);
  find(handle, "cublasLtMatmulAlgoGetHeuristic", library.candidates);
  find(handle, "cublasLtMatmul", library.matmul);
  return library;
}

}  // namespace

void add_library_folder(std::string folder) {
  const std::lock_guard lock(g_mutex);
  folders().push_back(std::move(folder));
}

const Library& library() {
  static const Library opened = open();  // a throw leaves it unopened: the next call tries again
  return opened;
}

}  // namespace maga::cuda::lt
