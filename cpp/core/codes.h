// 8-bit numbers that share a scale: int8, and fp8 of either kind. What a code stands for, and how a number becomes one.
//
// Functions are static, so that kernels of one instruction set do not share a copy with those of another, and constexpr, so that
// kernels on a GPU can call them.
#pragma once

#include "core/dtype.h"

namespace maga {

// What the largest code stands for, of those that are used; the smallest is its opposite.
constexpr float largest_code(DType type) { return type == DType::i8 ? 127 : type == DType::f8_e4m3 ? 448 : 57344; }

// 4 bits of exponent (bias 7), 3 of mantissa, no infinity.
static constexpr float e4m3_to_float(uint8_t code) {
  const uint32_t magnitude = code & 0x7fu;
  const float size = std::bit_cast<float>(magnitude << 20) * 0x1p120f;  // as fp32 with the same exponent, also where that is 0
  const float value = magnitude == 0x7fu ? std::bit_cast<float>(0x7fc00000u) : size;
  return code & 0x80u ? -value : value;
}

// 5 bits of exponent (bias 15), 2 of mantissa: the upper half of an fp16 number.
static constexpr float e5m2_to_float(uint8_t code) {
  const uint32_t magnitude = code & 0x7fu;
  const float size = std::bit_cast<float>(magnitude << 21) * 0x1p112f;
  const float value = magnitude > 0x7cu    ? std::bit_cast<float>(0x7fc00000u)
                      : magnitude == 0x7cu ? std::bit_cast<float>(0x7f800000u)
                                           : size;
  return code & 0x80u ? -value : value;
}

// To nearest even; beyond the largest finite number, that. Not for NaN.
template <int kMantissa, int kBias>
static constexpr uint8_t float_to_fp8(float value, float largest) {
  constexpr int kDropped = 23 - kMantissa;
  constexpr float kShift = std::bit_cast<float>(static_cast<uint32_t>(127 + kDropped - kBias + 1) << 23);
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t most = std::bit_cast<uint32_t>(largest), all = bits & 0x7fffffffu, magnitude = all < most ? all : most;
  const uint32_t even = (1u << (kDropped - 1)) - 1 + (magnitude >> kDropped & 1u);
  const uint32_t normal = (magnitude + even - (static_cast<uint32_t>(127 - kBias) << 23)) >> kDropped;
  // Below the smallest normal number an addition rounds to whole steps.
  const float shifted = std::bit_cast<float>(magnitude) + kShift;
  const uint32_t small = std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(kShift);
  const uint32_t code = magnitude < static_cast<uint32_t>(127 - kBias + 1) << 23 ? small : normal;
  return static_cast<uint8_t>(code | (bits >> 24 & 0x80u));
}
static constexpr uint8_t float_to_e4m3(float value) { return float_to_fp8<3, 7>(value, 448); }
static constexpr uint8_t float_to_e5m2(float value) { return float_to_fp8<2, 15>(value, 57344); }

// The scale (bits of a bf16 number) of numbers up to `most` in size: the least that leaves none of them beyond the largest code, or
// `given` (a bf16 number) if that is not 0. 0 where they are too small to tell from 0; not finite where one of them is not.
static constexpr uint16_t code_scale(float most, float largest, float given) {
  const uint32_t bits = std::bit_cast<uint32_t>(most / largest);
  if (bits >= 0x7f800000u) return 0x7fc0u;
  if (given != 0) return static_cast<uint16_t>(std::bit_cast<uint32_t>(given) >> 16);
  return most < 1e-30f ? 0 : static_cast<uint16_t>((bits + 0xffffu) >> 16);
}
// What numbers are multiplied with to become codes.
static constexpr float code_inverse(float scale) { return scale > 0 ? 1 / scale : 0.0f; }

}  // namespace maga
