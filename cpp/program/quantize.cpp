#include "program/quantize.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "core/codes.h"

namespace maga {
namespace {

constexpr int kTries = 9;
constexpr int kLanes = 8;  // sums side by side, which the compiler makes vectors of

// To the nearest integer, ties to even, for numbers below 2^22: without a call, so that loops of it become vectors.
inline float nearest(float x) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23
  return (x + kShift) - kShift;
}

inline float code_of(float x, float inverse, float low, float high) { return nearest(std::clamp(x * inverse, low, high)); }

// Row `row` of a matrix as fp32.
void widen_row(const Tensor& values, int64_t row, std::vector<float>* to) {
  const auto count = static_cast<int64_t>(to->size()), first = row * count;
  if (values.dtype == DType::f32)
    std::copy_n(values.as<float>() + first, count, to->begin());
  else if (values.dtype == DType::bf16)
    std::transform(values.as<uint16_t>() + first, values.as<uint16_t>() + first + count, to->begin(), bf16_to_float);
  else
    std::transform(values.as<uint16_t>() + first, values.as<uint16_t>() + first + count, to->begin(), f16_to_float);
}

std::shared_ptr<std::byte> allocate(int64_t bytes) {
  return {static_cast<std::byte*>(::operator new(static_cast<size_t>(std::max<int64_t>(bytes, 1)))),
          [](std::byte* p) { ::operator delete(p); }};
}

// To an fp16's value, as kernels keep scales; what an fp16 cannot hold stays as it is.
float as_half(float scale) {
  const float half = f16_to_float(float_to_f16(scale));
  return std::isfinite(half) && std::fabs(half) > 6.2e-5f ? half : scale;
}

// The scale of a group: x ~ scale * q with whole q in [low, high].
float scale_of(const float* x, int64_t count, float low, float high, bool search) {
  float largest = 0;
  for (int64_t i = 0; i < count; ++i)
    if (std::fabs(x[i]) > std::fabs(largest)) largest = x[i];
  if (largest == 0) return 0;
  if (!search) return as_half(std::fabs(largest) / high);
  // The largest value gets the largest code, which is `low`, or one somewhat nearer to 0 or beyond. For given codes the best scale
  // follows from them, and the squared error that is left is smallest where (x . q)^2 / (q . q) is largest.
  float best = 0, most = -1;
  for (int i = 0; i < kTries; ++i) {
    const float inverse = (low - 0.1f * static_cast<float>(i - kTries / 2)) / largest;
    float xq[kLanes] = {}, qq[kLanes] = {};
    int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes)
      for (int lane = 0; lane < kLanes; ++lane) {
        const float q = code_of(x[j + lane], inverse, low, high);
        xq[lane] += x[j + lane] * q;
        qq[lane] += q * q;
      }
    for (; j < count; ++j) {
      const float q = code_of(x[j], inverse, low, high);
      xq[0] += x[j] * q;
      qq[0] += q * q;
    }
    const float product = std::accumulate(xq, xq + kLanes, 0.0f), square = std::accumulate(qq, qq + kLanes, 0.0f);
    if (square > 0 && product * product > most * square) most = product * product / square, best = product / square;
  }
  return as_half(best);
}

void require_matrix(const Tensor& values, const std::string& name) {
  MAGA_REQUIRE(values.dtype == DType::f32 || values.dtype == DType::f16 || values.dtype == DType::bf16, "weight ", name, " is ",
               name_of(values.dtype));
  MAGA_REQUIRE(values.shape.size() == 2, "weight ", name, ": only matrices are rounded");
}

struct Rounded {
  Tensor codes;  // (rows, cols) u8
  Tensor scale;  // (rows, groups) fp32
};

// `round(row, codes, scales)` makes them of each row in fp32.
template <typename Round>
Rounded round_rows(const Tensor& values, int64_t groups, const std::string& name, Round round) {
  const int64_t rows = values.shape[0], cols = values.shape[1];
  auto codes = allocate(rows * cols), scales = allocate(rows * groups * 4);
  std::vector<float> row(cols);
  for (int64_t r = 0; r < rows; ++r) {
    widen_row(values, r, &row);
    MAGA_REQUIRE(std::all_of(row.begin(), row.end(), [](float x) { return std::isfinite(x); }), "weight ", name,
                 " has values in row ", r, " that are not finite");
    round(row.data(), reinterpret_cast<uint8_t*>(codes.get()) + r * cols, reinterpret_cast<float*>(scales.get()) + r * groups);
  }
  return {{codes.get(), DType::u8, {rows, cols}, codes}, {scales.get(), DType::f32, {rows, groups}, scales}};
}

}  // namespace

Affine quantize(const Tensor& values, int bits, int64_t group, const std::string& name) {
  MAGA_REQUIRE(bits >= 2 && bits <= 8, "weight ", name, ": ", bits, " bits; 2 to 8 can be made");
  require_matrix(values, name);
  const int64_t cols = values.shape[1];
  MAGA_REQUIRE(group > 0 && cols % group == 0, "weight ", name, ": groups of ", group, " columns do not divide it");
  const int middle = 1 << (bits - 1);
  const float high = static_cast<float>(middle - 1), low = bits == 8 ? -high : -high - 1;
  Rounded rounded = round_rows(values, cols / group, name, [&](const float* row, uint8_t* codes, float* scales) {
    for (int64_t first = 0; first < cols; first += group, ++scales) {
      const float scale = scale_of(row + first, group, low, high, bits < 8), inverse = scale == 0 ? 0 : 1 / scale;
      *scales = scale;
      for (int64_t c = first; c < first + group; ++c)
        codes[c] = static_cast<uint8_t>(code_of(row[c], inverse, low, high) + static_cast<float>(middle));
    }
  });
  return {.codes = std::move(rounded.codes),
          .bits = bits,
          .group = group,
          .scale = std::move(rounded.scale),
          .offset = {},
          .zero = middle};
}

Float8 quantize_fp8(const Tensor& values, const std::string& name) {
  constexpr float kLargest = 448;  // of e4m3
  require_matrix(values, name);
  const int64_t cols = values.shape[1];
  Rounded rounded = round_rows(values, 1, name, [&](const float* row, uint8_t* codes, float* scale) {
    float largest = 0;
    for (int64_t c = 0; c < cols; ++c) largest = std::max(largest, std::fabs(row[c]));
    *scale = largest / kLargest;
    const bool tiny = *scale < 1e-38f;  // its inverse is out of range, and so is nearly every code
    if (tiny) *scale = 0;
    const float inverse = tiny ? 0 : 1 / *scale;
    for (int64_t c = 0; c < cols; ++c) codes[c] = float_to_e4m3(row[c] * inverse);
  });
  return {.codes = std::move(rounded.codes), .high = 1, .wide = cols, .scale = std::move(rounded.scale)};
}

}  // namespace maga
