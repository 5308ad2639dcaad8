#include "backends/cuda/upload.h"

#include <algorithm>
#include <cstring>

#include "backends/cuda/cuda_check.h"
#include "backends/cuda/linear_affine.h"

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

void convert(const Float8& from, int64_t begin, int64_t end, DType type, std::byte* to) {
  const int64_t cols = from.codes.shape[1];
  for (int64_t i = begin; i < end; ++i) {
    const float value = value_at(from, i / cols, i % cols);
    if (type == DType::f32)
      reinterpret_cast<float*>(to)[i - begin] = value;
    else
      reinterpret_cast<uint16_t*>(to)[i - begin] = type == DType::f16 ? float_to_f16(value) : float_to_bf16(value);
  }
}

// Why no kernel takes the codes; empty: one does. `type`: of the values that kernels compute with.
std::string why_widened(const Float8& weight, DType type) {
  int device = 0, major = 0;
  MAGA_CUDA(cudaGetDevice(&device));
  MAGA_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  if (major != 9) return "kernels for fp8 need sm_90";
  if (type == DType::f32) return "kernels for fp8 compute in bf16 or fp16";
  if (weight.wide < weight.codes.shape[1]) return "kernels for fp8 take no scales of blocks of columns";
  if (weight.codes.shape[0] % 16 != 0 || weight.codes.shape[1] % 16 != 0)
    return "kernels for fp8 take rows and columns in multiples of 16";
  return {};
}

// Of codes, scales and offsets.
int64_t staged_row_bytes(const Affine& weight) {
  const int64_t cols = weight.codes.shape[1];
  return cols + cols / weight.group * 2 * static_cast<int64_t>(sizeof(float));
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

Uploader::Uploader(int lanes, DType type, bool packs) : type_(type), packs_(packs) {
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
    std::visit([&](const auto& form) { check(matrix_spec, form); }, matrix);
    if (!std::holds_alternative<Dense>(matrix)) widened_ = "stacks of experts";
    uploader_->copy(matrix_spec, matrix, memory_.data() + added_ * bytes_of(matrix_spec, uploader_->type_));
  }
  std::shared_ptr<const Weight> packed() override {
    return std::make_shared<DeviceWeight>(spec_.shape, uploader_->type_, WeightLayout{}, std::move(memory_), widened_);
  }

 private:
  Uploader* uploader_;
  int device_;
  DeviceMemory memory_;
  std::string widened_;
};

std::unique_ptr<WeightStack> Uploader::stack(const WeightSpec& spec, int device) {
  return std::make_unique<Stack>(this, spec, device);
}

std::shared_ptr<const DeviceWeight> Uploader::upload(const WeightSpec& spec, const Canonical& weight) {
  MAGA_REQUIRE(spec.shape.size() <= 2, spec.name, ": a stack of matrices is given one by one");
  std::visit([&](const auto& form) { check(spec, form); }, weight);
  std::string widened;
  if (const auto* codes = std::get_if<Float8>(&weight)) {
    widened = why_widened(*codes, type_);
    if (widened.empty()) return upload_fp8(spec, *codes);
  }
  if (const auto* codes = std::get_if<Affine>(&weight)) {
    if (const AffineLayout layout = layout_of(*codes, &widened); layout.bits > 0) {
      DeviceMemory memory(affine_bytes(layout, spec.shape[0], spec.shape[1]), "weights");
      pack(*codes, layout, memory.data());
      return std::make_shared<DeviceWeight>(spec.shape, type_, WeightLayout{WeightForm::affine, layout}, std::move(memory), "");
    }
  }
  DeviceMemory memory(bytes_of(spec, type_), "weights");
  copy(spec, weight, memory.data());
  return std::make_shared<DeviceWeight>(spec.shape, type_, WeightLayout{}, std::move(memory), widened);
}

AffineLayout Uploader::layout_of(const Affine& weight, std::string* why) const {
  const int64_t cols = weight.codes.shape[1];
  if (!packs_) {
    *why = "the GPU has no kernels for codes";
    return {};
  }
  if (type_ == DType::f32) {
    *why = "the model computes in fp32";
    return {};
  }
  if (kUnitRows * staged_row_bytes(weight) > kChunkBytes) {
    *why = concat(cols, " columns");
    return {};
  }
  return affine_layout(weight, type_, why);
}

// Rows of codes with their scales and offsets go to the card as they are; a kernel there makes units of them.
void Uploader::pack(const Affine& weight, const AffineLayout& layout, std::byte* to) {
  const int64_t rows = weight.codes.shape[0], cols = weight.codes.shape[1], groups = cols / weight.group;
  const int64_t chunk = kChunkBytes / staged_row_bytes(weight) / kUnitRows * kUnitRows;
  const DeviceMemory staged[2] = {DeviceMemory(kChunkBytes, "the upload of weights"),
                                  DeviceMemory(kChunkBytes, "the upload of weights")};
  const Turn lane(this);
  int b = 0;
  for (int64_t first = 0; first < rows; first += chunk, b ^= 1) {
    if (lane->buffers[b].bytes() == 0) lane->buffers[b] = PinnedMemory(kChunkBytes, "the upload of weights");
    MAGA_CUDA(cudaEventSynchronize(lane->copied[b]));
    AffineRows part{.rows = std::min(chunk, rows - first), .cols = cols, .group = weight.group, .zero = weight.zero};
    int64_t used = 0;
    const auto stage = [&]<typename T>(const Tensor& from, int64_t width, const T** place) {
      if (from.empty()) return;
      const int64_t bytes = part.rows * width * static_cast<int64_t>(sizeof(T));
      std::memcpy(lane->buffers[b].data() + used, from.as<T>() + first * width, static_cast<size_t>(bytes));
      *place = reinterpret_cast<const T*>(staged[b].data() + used);
      used += bytes;
    };
    stage(weight.scale, groups, &part.scale);
    stage(weight.offset, groups, &part.offset);
    stage(weight.codes, cols, &part.codes);
    MAGA_CUDA(cudaMemcpyAsync(staged[b].data(), lane->buffers[b].data(), static_cast<size_t>(used), cudaMemcpyHostToDevice,
                              lane->stream));
    affine_pack(lane->stream, type_, layout, part, to + affine_bytes(layout, first, cols));
    MAGA_CUDA(cudaEventRecord(lane->copied[b], lane->stream));
  }
  MAGA_CUDA(cudaStreamSynchronize(lane->stream));
}

// As WeightForm::fp8 says.
std::shared_ptr<const DeviceWeight> Uploader::upload_fp8(const WeightSpec& spec, const Float8& weight) {
  const int64_t rows = spec.shape[0], codes = rows * spec.shape[1];
  DeviceMemory memory(codes + rows * static_cast<int64_t>(sizeof(float)), "weights");
  std::vector<float> scales(rows);
  for (int64_t r = 0; r < rows; ++r) scales[r] = weight.scale.as<float>()[r / weight.high];
  const auto plainly = [&](std::byte* to, const void* from, int64_t bytes) {
    send(to, bytes, [&](int64_t begin, int64_t end, std::byte* staged) {
      std::memcpy(staged, static_cast<const std::byte*>(from) + begin, static_cast<size_t>(end - begin));
    });
  };
  plainly(memory.data(), weight.codes.data, codes);
  plainly(memory.data() + codes, scales.data(), rows * static_cast<int64_t>(sizeof(float)));
  return std::make_shared<DeviceWeight>(spec.shape, type_, WeightLayout{.form = WeightForm::fp8}, std::move(memory), "");
}

void Uploader::copy(const WeightSpec& spec, const Canonical& weight, std::byte* to) {
  const int64_t size = size_of(type_);
  send(to, bytes_of(spec, type_), [&](int64_t begin, int64_t end, std::byte* staged) {
    std::visit(
        [&](const auto& form) {
          if constexpr (std::is_same_v<std::decay_t<decltype(form)>, Dense>)
            convert(form.values, begin / size, end / size, type_, staged);
          else
            convert(form, begin / size, end / size, type_, staged);
        },
        weight);
  });
}

void Uploader::send(std::byte* to, int64_t bytes, const Fill& fill) {
  const Turn lane(this);
  for (int b = 0; b < 2; ++b)
    if (lane->buffers[b].bytes() == 0) lane->buffers[b] = PinnedMemory(kChunkBytes, "the upload of weights");
  int b = 0;
  for (int64_t begin = 0; begin < bytes; begin += kChunkBytes, b ^= 1) {
    const int64_t end = std::min(bytes, begin + kChunkBytes);
    MAGA_CUDA(cudaEventSynchronize(lane->copied[b]));
    fill(begin, end, lane->buffers[b].data());
    MAGA_CUDA(cudaMemcpyAsync(to + begin, lane->buffers[b].data(), static_cast<size_t>(end - begin), cudaMemcpyHostToDevice,
                              lane->stream));
    MAGA_CUDA(cudaEventRecord(lane->copied[b], lane->stream));
  }
  MAGA_CUDA(cudaStreamSynchronize(lane->stream));
}

}  // namespace maga::cuda
