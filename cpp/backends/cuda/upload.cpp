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

}  // namespace

int64_t dense_bytes(const WeightSpec& spec, DType type) {
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

Uploader::Turn::Turn(Uploader* uploader) : uploader_(uploader) {
  std::unique_lock lock(uploader->mutex_);
  uploader->freed_.wait(lock, [&] { return !uploader->idle_.empty(); });
  lane_ = uploader->idle_.back();
  uploader->idle_.pop_back();
}

Uploader::Turn::~Turn() {
  {
    const std::lock_guard lock(uploader_->mutex_);
    uploader_->idle_.push_back(lane_);
  }
  uploader_->freed_.notify_one();
}

Uploader::Uploader(int lanes, DType type, int capability) : type_(type), capability_(capability) {
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

std::shared_ptr<const DeviceWeight> Uploader::upload(const WeightSpec& spec, const Canonical& weight) {
  MAGA_REQUIRE(spec.shape.size() <= 2, spec.name, ": a stack of matrices is given one by one");
  std::visit([&](const auto& form) { check(spec, form); }, weight);
  const auto* float8 = std::get_if<Float8>(&weight);
  if (float8 && takes_fp8(*float8)) return upload_fp8(spec, *float8);
  return std::visit(
      [&](const auto& form) {
        std::string widened;
        const AffineLayout layout = layout_of(form, &widened);
        const bool units = layout.bits > 0;
        DeviceMemory memory(units ? affine_bytes(layout, spec.shape[0], spec.shape[1]) : dense_bytes(spec, type_), "weights");
        if (units)
          pack(form, layout, memory.data());
        else
          copy(spec, weight, memory.data());
        return std::make_shared<const DeviceWeight>(
            spec.shape, type_, units ? WeightLayout{WeightForm::affine, layout} : WeightLayout{}, std::move(memory), widened);
      },
      weight);
}

// Whether the kernels for fp8 tokens take it.
bool Uploader::takes_fp8(const Float8& weight) const {
  return capability_ / 10 == 9 && type_ != DType::f32 && weight.wide >= weight.codes.shape[1] && weight.codes.shape[0] % 16 == 0 &&
         weight.codes.shape[1] % 16 == 0;
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
  return std::make_shared<DeviceWeight>(spec.shape, type_, WeightLayout{WeightForm::fp8, {}}, std::move(memory), "");
}

void Uploader::copy(const WeightSpec& spec, const Canonical& weight, std::byte* to) {
  const int64_t size = size_of(type_);
  send(to, dense_bytes(spec, type_), [&](int64_t begin, int64_t end, std::byte* staged) {
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
