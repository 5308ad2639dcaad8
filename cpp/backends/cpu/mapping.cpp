// Anonymous mmap behind a destructor.
#include "backends/cpu/mapping.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "core/check.h"

namespace maga::cpu {

Mapping::Mapping(int64_t bytes, const char* purpose) : bytes_(bytes) {
  // MAP_NORESERVE: a pool may be larger than what will ever be touched.
  void* at = mmap(nullptr, static_cast<size_t>(bytes > 0 ? bytes : 1), PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  MAGA_CHECK(at != MAP_FAILED, "no memory for ", purpose, ": ", bytes, " bytes: ", std::strerror(errno));
  data_ = static_cast<std::byte*>(at);
}

Mapping::~Mapping() { munmap(data_, static_cast<size_t>(bytes_ > 0 ? bytes_ : 1)); }

}  // namespace maga::cpu
