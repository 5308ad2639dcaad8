// Random codes and what they stand for.
#include <cuda_fp8.h>

#include "cuda_linear_coded_checker.cuh"

namespace maga::bench {
namespace {

constexpr int kThreads = 256;

// Only where groups are whole units may the last one of a row be short.
__device__ int64_t groups_of(const cuda::AffineRows& rows) {
  return (rows.cols + (rows.group == cuda::kUnitColumns ? rows.group - 1 : 0)) / rows.group;
}

__global__ void make_codes(cuda::AffineRows rows, int bits, bool e4m3, uint32_t seed, uint8_t* codes) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < rows.rows * rows.cols; i += int64_t{gridDim.x} * kThreads) {
    const auto code = static_cast<uint8_t>(hash(i, seed) >> (32 - bits));
    codes[i] = e4m3 && (code & 0x7f) == 0x7f ? code - 1 : code;  // not a number
  }
}

__global__ void make_scales(cuda::AffineRows rows, int bits, cuda::AffineShift shift, uint32_t seed, float* scale, float* offset) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < rows.rows * groups_of(rows);
       i += int64_t{gridDim.x} * kThreads) {
    const uint32_t h = hash(i, seed);
    const float size = rsqrtf(static_cast<float>(rows.cols)) * static_cast<float>(4 >> bits % 2) / static_cast<float>(1 << bits);
    scale[i] = __half2float(__float2half((h & 1 ? -1.f : 1.f) * size * (0.5f + static_cast<float>(h >> 8) / 16777216.f)));
    if (shift == cuda::AffineShift::zeros) offset[i] = -scale[i] * static_cast<float>((h >> 1) % (1u << bits));
    if (shift == cuda::AffineShift::offsets) offset[i] = size * (static_cast<float>((h >> 1) % 1000) - 500.f) * 0.01f;
  }
}

__global__ void compare_values(cuda::AffineRows rows, int middle, bool e4m3, DType type, const void* dense, float* worst) {
  const double half_unit = type == DType::bf16 ? 1. / 256 : 1. / 2048;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < rows.rows * rows.cols; i += int64_t{gridDim.x} * kThreads) {
    const int64_t group = i / rows.cols * groups_of(rows) + i % rows.cols / rows.group;
    const double scale = rows.scale[group], offset = rows.offset ? rows.offset[group] : 0;
    const double number =
        e4m3 ? __half2float(__half(__nv_cvt_fp8_to_halfraw(rows.codes[i], __NV_E4M3))) : rows.codes[i] - rows.zero;
    const double value = scale * number + offset;
    // The number, its scale and its offset are rounded; fp16 is coarse near 0.
    const double shift = offset + scale * (middle - rows.zero);
    const double allowed =
        half_unit * (2 * fabs(value) + (rows.offset ? 3 * fabs(shift) : 0)) + (type == DType::f16 ? 6e-8 : 1e-30);
    const double error = fabs(value_at(type, dense, i) - value) / allowed;
    atomicMax(reinterpret_cast<int*>(worst), __float_as_int(error == error ? static_cast<float>(error) : 1e9f));
  }
}

}  // namespace

std::string CodeForm::name() const {
  if (e4m3) return concat("e4m3, groups of ", group ? concat(group) : "a row");
  return concat(bits, " bits, groups of ", group ? concat(group) : "a row", shift == cuda::AffineShift::zeros ? ", zeros" : "",
                shift == cuda::AffineShift::offsets ? ", offsets" : "");
}

CodedWeight::CodedWeight(int64_t most_elements)
    : codes_(most_elements),
      scale_(most_elements / 2 + 4096),
      offset_(most_elements / 2 + 4096),
      units_(2 * most_elements + (4 << 20)),
      verdict_(4) {}

void CodedWeight::make(cudaStream_t stream, const CodeForm& form, DType type, int64_t rows, int64_t cols, uint32_t seed) {
  const int64_t group = form.group ? form.group : cols;
  const bool shifts = form.shift != cuda::AffineShift::none;
  rows_ = {};
  rows_.codes = static_cast<uint8_t*>(codes_.at()), rows_.scale = static_cast<float*>(scale_.at());
  if (shifts) rows_.offset = static_cast<float*>(offset_.at());
  rows_.rows = rows, rows_.cols = cols, rows_.group = group;
  if (form.e4m3) rows_.group = cuda::kUnitColumns;
  rows_.zero = form.e4m3 ? 0 : shifts ? 0 : 1 << (form.bits - 1);
  MAGA_CHECK(rows * cols <= static_cast<int64_t>(codes_.bytes()), rows, " x ", cols);
  make_codes<<<1024, kThreads, 0, stream>>>(rows_, form.bits, form.e4m3, seed, static_cast<uint8_t*>(codes_.at()));
  make_scales<<<1024, kThreads, 0, stream>>>(rows_, form.bits, form.shift, seed + 1, static_cast<float*>(scale_.at()),
                                             static_cast<float*>(offset_.at()));
  MAGA_CUDA(cudaGetLastError());
  if (form.e4m3) {
    layout_ = cuda::kFloat8Layout;
    MAGA_CHECK(cuda::affine_bytes(layout_, rows, cols) <= static_cast<int64_t>(units_.bytes()), rows, " x ", cols);
    cuda::float8_pack(stream, {.codes = rows_.codes, .scale = rows_.scale, .rows = rows, .cols = cols}, units_.at());
    return;
  }
  // The layout is found as at load, from the host's copy of the scales.
  const int64_t count = rows * (cols / group);
  std::vector<float> scale(count), offset(shifts ? count : 0);
  MAGA_CUDA(cudaMemcpyAsync(scale.data(), scale_.at(), count * 4, cudaMemcpyDeviceToHost, stream));
  if (shifts) MAGA_CUDA(cudaMemcpyAsync(offset.data(), offset_.at(), count * 4, cudaMemcpyDeviceToHost, stream));
  MAGA_CUDA(cudaStreamSynchronize(stream));
  const auto tensor = [&](const std::vector<float>& from) {
    Tensor tensor;
    if (from.empty()) return tensor;
    tensor.data = reinterpret_cast<const std::byte*>(from.data());
    tensor.dtype = DType::f32;
    tensor.shape = {rows, cols / group};
    return tensor;
  };
  Affine weight;
  weight.codes.dtype = DType::u8;
  weight.codes.shape = {rows, cols};
  weight.bits = form.bits, weight.group = group, weight.zero = rows_.zero;
  weight.scale = tensor(scale), weight.offset = tensor(offset);
  std::string why;
  layout_ = cuda::affine_layout(weight, type, &why);
  MAGA_CHECK(layout_.bits > 0, form.name(), ": ", why);
  MAGA_CHECK(cuda::affine_bytes(layout_, rows, cols) <= static_cast<int64_t>(units_.bytes()), rows, " x ", cols);
  cuda::affine_pack(stream, type, layout_, rows_, units_.at());
}

float CodedWeight::error(cudaStream_t stream, const void* dense, DType type) const {
  MAGA_CUDA(cudaMemsetAsync(verdict_.at(), 0, 4, stream));
  compare_values<<<1024, kThreads, 0, stream>>>(rows_, 1 << (layout_.bits - 1), layout_.bits == cuda::kE4m3, type, dense,
                                                static_cast<float*>(verdict_.at()));
  MAGA_CUDA(cudaGetLastError());
  float worst = 0;
  MAGA_CUDA(cudaMemcpyAsync(&worst, verdict_.at(), 4, cudaMemcpyDeviceToHost, stream));
  MAGA_CUDA(cudaStreamSynchronize(stream));
  return worst;
}

}  // namespace maga::bench
