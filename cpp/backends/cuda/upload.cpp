#include "backends/cuda/upload.h"

#include <algorithm>
#include <cstring>

#include "backends/cuda/cuda_check.h"

namespace maga::cuda {
namespace {

// Elements [begin, end) of `from`, as they are written into the card's type.
void convert(const Tensor& from, int64_t begin, int64_t end, DType type, std::byte* to) {
  if (from.dtype == type) {
    std::memcpy(to, from.data + begin * size_of(type), static_cast<size_t>((end - begin) * size_of(type)));
    return;
  }
  const auto each = [&](auto&& value_at) {
    switch (type) {
      case DType::f32:
        for (int64_t i = begin; i < end; ++i) reinterpret_cast<float*>(to)[i - begin] = value_at(i);
        break;
      case DType::f16:
        for (int64_t i = begin; i < end; ++i) reinterpret_cast<uint16_t*>(to)[i - begin] = float_to_f16(value_at(i));
        break;
      default:
        for (int64_t i = begin; i < end; ++i) reinterpret_cast<uint16_t*>(to)[i - begin] = float_to_bf16(value_at(i));
    }
  };
  switch (from.dtype) {
    case DType::f32: return each([p = from.as<float>()](int64_t i) { return p[i]; });
    case DType::f16: return each([p = from.as<uint16_t>()](int64_t i) { return f16_to_float(p[i]); });
    default: return each([p = from.as<uint16_t>()](int64_t i) { return bf16_to_float(p[i]); });
  }
}

void convert(const Affine& from, int64_t begin, int64_t end, DType type, std::byte* to) {
  const int64_t cols = from.codes.shape[1], groups = cols / from.group;
  const uint8_t* codes = from.codes.as<uint8_t>();
  const float* scale = from.scale.as<float>();
  const float* offset = from.offset.empty() ? nullptr : from.offset.as<float>();
  for (int64_t i = begin; i < end; ++i) {
    const int64_t at = i / cols * groups + i % cols / from.group;
    const float value = scale[at] * static_cast<float>(codes[i] - from.zero) + (offset ? offset[at] : 0.0f);
    if (type == DType::f32)
      reinterpret_cast<float*>(to)[i - begin] = value;
    else
      reinterpret_cast<uint16_t*>(to)[i - begin] = type == DType::f16 ? float_to_f16(value) : float_to_bf16(value);
  }
}

int64_t bytes_of(const WeightSpec& spec, DType type) {
  int64_t elements = 1;
  for (const int64_t size : spec.shape) elements *= size;
  return elements * size_of(type);
}

void check(const WeightSpec& spec, const Dense& weight) {
  const DType type = weight.values.dtype;
  MAGA_REQUIRE(type == DType::f32 || type == DType::f16 || type == DType::bf16, spec.name, ": ", name_of(type),
               " is not a type that the CUDA backend takes");
  MAGA_REQUIRE(weight.values.shape == spec.shape, spec.name, ": ", weight.values.elements(),
               " elements of another shape than the model's");
}

void check(const WeightSpec& spec, const Affine& weight) {
  MAGA_REQUIRE(weight.codes.shape == spec.shape && spec.shape.size() == 2, spec.name,
               ": the codes have another shape than the model's");
  MAGA_REQUIRE(weight.group > 0 && spec.shape[1] % weight.group == 0, spec.name, ": groups of ", weight.group,
               " columns do not divide ", spec.shape[1]);
  const std::vector<int64_t> scales{spec.shape[0], spec.shape[1] / weight.group};
  MAGA_REQUIRE(weight.scale.shape == scales && (weight.offset.empty() || weight.offset.shape == scales), spec.name,
               ": the scales have another shape than the codes' groups");
}

}  // namespace

// A lane for the length of one upload.
class Uploader::Turn {
 public:
  explicit Turn(Uploader* uploader) : uploader_(uploader) {
    std::unique_lock lock(uploader->mutex_);
    uploader->freed_.wait(lock, [&] { return !uploader->idle_.empty(); });
    lane_ = uploader->idle_.back();
    uploader->idle_.pop_back();
  }
  ~Turn() {
    {
      const std::lock_guard lock(uploader_->mutex_);
      uploader_->idle_.push_back(lane_);
    }
    uploader_->freed_.notify_one();
  }
  Lane* operator->() const { return lane_; }

 private:
  Uploader* uploader_;
  Lane* lane_;
};

Uploader::Uploader(int lanes, DType type) : type_(type) {
  for (int i = 0; i < lanes; ++i) {
    auto lane = std::make_unique<Lane>();
    MAGA_CUDA(cudaStreamCreateWithFlags(&lane->stream, cudaStreamNonBlocking));
    for (int b = 0; b < 2; ++b) MAGA_CUDA(cudaEventCreateWithFlags(&lane->copied[b], cudaEventDisableTiming));
    idle_.push_back(lane.get());
    lanes_.push_back(std::move(lane));
  }
}

Uploader::~Uploader() {
  for (const auto& lane : lanes_) {
    for (const cudaEvent_t event : lane->copied) cudaEventDestroy(event);
    cudaStreamDestroy(lane->stream);
  }
}

class Uploader::Stack : public WeightStack {
 public:
  Stack(Uploader* uploader, const WeightSpec& spec, int device)
      : WeightStack(spec), uploader_(uploader), device_(device), memory_(bytes_of(spec, uploader->type_), "weights") {}

 protected:
  void append(const WeightSpec& matrix_spec, const Canonical& matrix) override {
    use_device(device_);  // any thread may come in
    uploader_->copy(matrix_spec, matrix, memory_.data() + added_ * bytes_of(matrix_spec, uploader_->type_));
  }
  std::shared_ptr<const Weight> packed() override {
    return std::make_shared<DeviceWeight>(spec_.shape, uploader_->type_, std::move(memory_));
  }

 private:
  Uploader* uploader_;
  int device_;
  DeviceMemory memory_;
};

std::unique_ptr<WeightStack> Uploader::stack(const WeightSpec& spec, int device) {
  return std::make_unique<Stack>(this, spec, device);
}

std::shared_ptr<const DeviceWeight> Uploader::upload(const WeightSpec& spec, const Canonical& weight) {
  MAGA_REQUIRE(spec.shape.size() <= 2, spec.name, ": a stack of matrices is given one by one");
  DeviceMemory memory(bytes_of(spec, type_), "weights");
  copy(spec, weight, memory.data());
  return std::make_shared<DeviceWeight>(spec.shape, type_, std::move(memory));
}

void Uploader::copy(const WeightSpec& spec, const Canonical& weight, std::byte* to) {
  std::visit([&](const auto& form) { check(spec, form); }, weight);
  const int64_t elements = bytes_of(spec, type_) / size_of(type_);
  const int64_t chunk = kChunkBytes / size_of(type_);
  const Turn lane(this);
  for (int b = 0; b < 2; ++b)
    if (lane->buffers[b].bytes() == 0) lane->buffers[b] = PinnedMemory(kChunkBytes, "the upload of weights");
  int b = 0;
  for (int64_t begin = 0; begin < elements; begin += chunk, b ^= 1) {
    const int64_t end = std::min(elements, begin + chunk);
    MAGA_CUDA(cudaEventSynchronize(lane->copied[b]));
    std::visit(
        [&](const auto& form) {
          if constexpr (std::is_same_v<std::decay_t<decltype(form)>, Dense>)
            convert(form.values, begin, end, type_, lane->buffers[b].data());
          else
            convert(form, begin, end, type_, lane->buffers[b].data());
        },
        weight);
    MAGA_CUDA(cudaMemcpyAsync(to + begin * size_of(type_), lane->buffers[b].data(),
                              static_cast<size_t>((end - begin) * size_of(type_)), cudaMemcpyHostToDevice, lane->stream));
    MAGA_CUDA(cudaEventRecord(lane->copied[b], lane->stream));
  }
  MAGA_CUDA(cudaStreamSynchronize(lane->stream));
}

}  // namespace maga::cuda
