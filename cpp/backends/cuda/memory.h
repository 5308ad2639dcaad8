// Memory of the card and page-locked memory of the host, owned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

namespace maga::cuda {

// Makes `device` the calling thread's current one. Every door of the backend starts with it, as any thread may come in.
void use_device(int device);

class DeviceMemory {
 public:
  DeviceMemory() = default;
  // Throws Error naming `purpose`, the bytes wanted and the bytes free when the card has no room.
  DeviceMemory(int64_t bytes, const char* purpose);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  std::byte* data() const { return data_; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  int64_t bytes() const { return bytes_; }
  // Held by all of this process together.
  static int64_t all_bytes();

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

class PinnedMemory {
 public:
  PinnedMemory() = default;
  PinnedMemory(int64_t bytes, const char* purpose);
  ~PinnedMemory();
  PinnedMemory(PinnedMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  PinnedMemory& operator=(PinnedMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  std::byte* data() const { return data_; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace maga::cuda
