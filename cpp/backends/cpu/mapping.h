// Zero-filled memory straight from the system: page-aligned, and free of cost until it is touched.
#pragma once

#include <cstddef>
#include <cstdint>

namespace maga::cpu {

class Mapping {
 public:
  // Throws Error naming `purpose` when the system has no room.
  Mapping(int64_t bytes, const char* purpose);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* data_;
  int64_t bytes_;
};

}  // namespace maga::cpu
