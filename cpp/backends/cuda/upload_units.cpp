// Codes to the card, as units, of a matrix or a stack of them.
#include <algorithm>
#include <cstring>

#include "backends/cuda/cuda_check.h"
#include "backends/cuda/linear_affine.h"
#include "backends/cuda/upload.h"

namespace maga::cuda {
namespace {

// Of codes, scales and offsets.
int64_t staged_row_bytes(const Affine& weight) {
  const int64_t cols = weight.codes.shape[1];
  return cols + cols / weight.group * 2 * static_cast<int64_t>(sizeof(float));
}
int64_t staged_row_bytes(const Float8& weight) {
  const int64_t cols = weight.codes.shape[1];
  return cols + affine_units(cols, kUnitColumns) * static_cast<int64_t>(sizeof(float));
}

// Whether a weight that would have the layout `own` can be packed in that of `stack`.
bool holds(const AffineLayout& stack, const AffineLayout& own) {
  AffineLayout same = own;
  same.shift = stack.shift;
  return own.bits > 0 && same == stack && own.shift <= stack.shift;
}

}  // namespace

// Arrays on their way to the card together.
class Uploader::Chunk {
 public:
  Chunk(std::byte* host, std::byte* device) : host_(host), device_(device) {}
  // Where on the card they will be.
  template <typename T>
  const T* put(const T* from, int64_t count) {
    const auto bytes = static_cast<size_t>(count) * sizeof(T);
    std::memcpy(host_ + used, from, bytes);
    return reinterpret_cast<const T*>(device_ + std::exchange(used, used + bytes));
  }
  size_t used = 0;

 private:
  std::byte *host_, *device_;
};

// Rows go to the card as they are; a kernel there makes units of them.
template <typename Stage>
void Uploader::pack_rows(int64_t rows, int64_t row_bytes, Stage&& stage) {
  const int64_t most = kChunkBytes / row_bytes / kUnitRows * kUnitRows;
  const DeviceMemory staged[2] = {DeviceMemory(kChunkBytes, "the upload of weights"),
                                  DeviceMemory(kChunkBytes, "the upload of weights")};
  const Turn lane(this);
  int b = 0;
  for (int64_t first = 0; first < rows; first += most, b ^= 1) {
    if (lane->buffers[b].bytes() == 0) lane->buffers[b] = PinnedMemory(kChunkBytes, "the upload of weights");
    MAGA_CUDA(cudaEventSynchronize(lane->copied[b]));
    Chunk chunk(lane->buffers[b].data(), staged[b].data());
    const auto queue = stage(chunk, first, std::min(most, rows - first));
    MAGA_CUDA(cudaMemcpyAsync(staged[b].data(), lane->buffers[b].data(), chunk.used, cudaMemcpyHostToDevice, lane->stream));
    queue(lane->stream);
    MAGA_CUDA(cudaEventRecord(lane->copied[b], lane->stream));
  }
  MAGA_CUDA(cudaStreamSynchronize(lane->stream));
}

AffineLayout Uploader::layout_of(const Dense&, std::string*) const { return {}; }

AffineLayout Uploader::layout_of(const Affine& weight, std::string* why) const {
  *why = capability_ < 80                                     ? "the GPU has no kernels for codes"
         : type_ == DType::f32                                ? "the model computes in fp32"
         : kUnitRows * staged_row_bytes(weight) > kChunkBytes ? concat(weight.codes.shape[1], " columns")
                                                              : "";
  return why->empty() ? affine_layout(weight, type_, why) : AffineLayout{};
}

AffineLayout Uploader::layout_of(const Float8& weight, std::string* why) const {
  const int64_t cols = weight.codes.shape[1];
  *why = capability_ < 80      ? "kernels for fp8 need sm_80"
         : type_ == DType::f32 ? "kernels for fp8 compute in bf16 or fp16"
         : weight.wide < cols && weight.wide % kUnitColumns != 0
             ? concat("kernels for fp8 take scales of 128 columns and multiples, not of blocks of columns of ", weight.wide)
         : kUnitRows * staged_row_bytes(weight) > kChunkBytes ? concat(cols, " columns")
                                                              : "";
  return why->empty() ? kFloat8Layout : AffineLayout{};
}

void Uploader::pack(const Dense&, const AffineLayout&, std::byte*) {}

void Uploader::pack(const Affine& weight, const AffineLayout& layout, std::byte* to) {
  const int64_t rows = weight.codes.shape[0], cols = weight.codes.shape[1], groups = cols / weight.group;
  pack_rows(rows, staged_row_bytes(weight), [&](Chunk& chunk, int64_t first, int64_t count) {
    AffineRows part{.rows = count, .cols = cols, .group = weight.group, .zero = weight.zero};
    part.scale = chunk.put(weight.scale.as<float>() + first * groups, count * groups);
    if (!weight.offset.empty()) part.offset = chunk.put(weight.offset.as<float>() + first * groups, count * groups);
    part.codes = chunk.put(weight.codes.as<uint8_t>() + first * cols, count * cols);
    return [=, this](cudaStream_t stream) { affine_pack(stream, type_, layout, part, to + affine_bytes(layout, first, cols)); };
  });
}

void Uploader::pack(const Float8& weight, const AffineLayout& layout, std::byte* to) {
  const int64_t rows = weight.codes.shape[0], cols = weight.codes.shape[1], across = affine_units(cols, kUnitColumns);
  const int64_t blocks = weight.scale.shape[1];
  std::vector<float> scales;
  pack_rows(rows, staged_row_bytes(weight), [&](Chunk& chunk, int64_t first, int64_t count) {
    scales.clear();
    for (int64_t row = first; row < first + count; ++row)
      for (int64_t unit = 0; unit < across; ++unit)
        scales.push_back(weight.scale.as<float>()[row / weight.high * blocks + unit * kUnitColumns / weight.wide]);
    Float8Rows part{.rows = count, .cols = cols};
    part.scale = chunk.put(scales.data(), count * across);
    part.codes = chunk.put(weight.codes.as<uint8_t>() + first * cols, count * cols);
    return [=](cudaStream_t stream) { float8_pack(stream, part, to + affine_bytes(layout, first, cols)); };
  });
}

// Stays codes while one layout holds all of its matrices; else those that are there already are made dense.
class Uploader::Stack : public WeightStack {
 public:
  Stack(Uploader* uploader, const WeightSpec& spec, int device) : WeightStack(spec), uploader_(uploader), device_(device) {}

 protected:
  void append(const WeightSpec& matrix_spec, const Canonical& matrix) override {
    use_device(device_);  // any thread may come in
    std::visit(
        [&](const auto& form) {
          check(matrix_spec, form);
          std::string why;
          AffineLayout own = uploader_->layout_of(form, &why);
          if (own.bits > 0 && matrix_spec.shape[0] % (2 * kUnitRows) != 0) {
            own = {};
            why = concat("experts of ", matrix_spec.shape[0], " rows");
          }
          if (added_ == 0) {
            layout_ = own;
            memory_ = DeviceMemory(spec_.shape[0] * matrix_bytes(), "weights");
          } else if (layout_.bits > 0 && !holds(layout_, own)) {
            make_dense();
            why = why.empty() ? "experts in several forms" : why;
          } else if (layout_.bits == 0 && own.bits > 0) {
            why = "experts in several forms";
          }
          if (widened_.empty()) widened_ = why;
          std::byte* const to = memory_.data() + added_ * matrix_bytes();
          if (layout_.bits > 0)
            uploader_->pack(form, layout_, to);
          else
            uploader_->copy(matrix_spec, matrix, to);
        },
        matrix);
  }
  std::shared_ptr<const Weight> packed() override {
    const WeightLayout layout = layout_.bits > 0 ? WeightLayout{WeightForm::affine, layout_} : WeightLayout{};
    return std::make_shared<DeviceWeight>(spec_.shape, uploader_->type_, layout, std::move(memory_), widened_);
  }

 private:
  int64_t matrix_bytes() const {
    return layout_.bits > 0 ? affine_bytes(layout_, spec_.shape[1], spec_.shape[2])
                            : spec_.shape[1] * spec_.shape[2] * size_of(uploader_->type_);
  }
  void make_dense() {
    DeviceMemory dense(dense_bytes(spec_, uploader_->type_), "weights");
    const Turn lane(uploader_);
    affine_unpack({lane->stream, false}, uploader_->type_, layout_, memory_.data(), 0, added_ * spec_.shape[1], spec_.shape[2],
                  dense.data());
    MAGA_CUDA(cudaStreamSynchronize(lane->stream));
    memory_ = std::move(dense);
    layout_ = {};
  }

  Uploader* uploader_;
  int device_;
  AffineLayout layout_;  // bits 0: dense
  DeviceMemory memory_;
  std::string widened_;
};

std::unique_ptr<WeightStack> Uploader::stack(const WeightSpec& spec, int device) {
  return std::make_unique<Stack>(this, spec, device);
}

}  // namespace maga::cuda
