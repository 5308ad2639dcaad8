// Memory of the card and page-locked memory of the host, owned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace maga::cuda {

// Makes `device` the calling thread's current one. Every door of the backend starts with it, as any thread may come in.
void use_device(int device);

enum class MemoryKind : uint8_t { device, pinned };

template <MemoryKind kKind>
class Memory {
 public:
  Memory() = default;
  // Throws Error naming `purpose` and the bytes wanted when there is no room.
  Memory(int64_t bytes, const char* purpose);
  ~Memory();
  Memory(Memory&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Memory& operator=(Memory&& other) noexcept {
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

using DeviceMemory = Memory<MemoryKind::device>;
using PinnedMemory = Memory<MemoryKind::pinned>;

template <>
DeviceMemory::Memory(int64_t bytes, const char* purpose);
template <>
DeviceMemory::~Memory();
template <>
PinnedMemory::Memory(int64_t bytes, const char* purpose);
template <>
PinnedMemory::~Memory();

// Of the card, held by all of this process together.
int64_t all_device_bytes();

}  // namespace maga::cuda
