// Canonical weights to the card. Each calling thread streams through page-locked buffers of its own turn, converting as it goes.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "backends/cuda/memory.h"
#include "backends/cuda/queue.h"
#include "backends/cuda/weight.h"

namespace maga::cuda {

class Uploader {
 public:
  // As many threads upload at once as there are lanes; the others wait.
  Uploader(int lanes, DType type, int capability);
  ~Uploader();

  // Checks shapes and forms; throws Error naming `spec`. Codes without a kernel here are widened to the compute type.
  std::shared_ptr<const DeviceWeight> upload(const WeightSpec& spec, const Canonical& weight);
  // The matrices of a stack, one after another into one block of memory of `device`.
  std::unique_ptr<WeightStack> stack(const WeightSpec& spec, int device);

 private:
  static constexpr int64_t kChunkBytes = 8 << 20;
  struct Lane {
    PinnedMemory buffers[2];
    cudaEvent_t copied[2] = {};
    cudaStream_t stream = nullptr;
  };
  class Turn;  // a lane for the length of one upload
  class Stack;
  bool takes_fp8(const Float8& weight) const;
  std::shared_ptr<const DeviceWeight> upload_fp8(const WeightSpec& spec, const Float8& weight);
  void copy(const WeightSpec& spec, const Canonical& weight, std::byte* to);
  // Into units, by rows: `stage(chunk, first, count)` adds arrays to a chunk and returns what is then queued on its stream.
  class Chunk;
  template <typename Stage>
  void pack_rows(int64_t rows, int64_t row_bytes, Stage&& stage);
  void pack(const Dense& weight, const AffineLayout& layout, std::byte* to);  // never: its layout has no bits
  void pack(const Affine& weight, const AffineLayout& layout, std::byte* to);
  void pack(const Float8& weight, const AffineLayout& layout, std::byte* to);
  // Bits 0: no kernel takes it as units, and `why` says so of codes.
  AffineLayout layout_of(const Dense& weight, std::string* why) const;
  AffineLayout layout_of(const Affine& weight, std::string* why) const;
  AffineLayout layout_of(const Float8& weight, std::string* why) const;
  // `fill` writes bytes [begin, end) of what goes to the card at `to`, chunk by chunk.
  using Fill = std::function<void(int64_t begin, int64_t end, std::byte* staged)>;
  void send(std::byte* to, int64_t bytes, const Fill& fill);

  std::vector<std::unique_ptr<Lane>> lanes_;
  std::vector<Lane*> idle_;
  std::mutex mutex_;
  std::condition_variable freed_;
  DType type_;
  int capability_;
};

class Uploader::Turn {
 public:
  explicit Turn(Uploader* uploader);
  ~Turn();
  Lane* operator->() const { return lane_; }

 private:
  Uploader* uploader_;
  Lane* lane_;
};

// Throw Error naming `spec` unless the parts fit together and have the shape that it states.
void check(const WeightSpec& spec, const Dense& weight);
void check(const WeightSpec& spec, const Affine& weight);
int64_t dense_bytes(const WeightSpec& spec, DType type);

}  // namespace maga::cuda
