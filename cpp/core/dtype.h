// Element types, their sizes and names, and the scalar conversions between fp16/bf16 and fp32.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "core/check.h"

namespace maga {

enum class DType : uint8_t { f32, f16, bf16, f64, i8, u8, i32, i64, f8_e4m3, f8_e5m2 };

constexpr int64_t size_of(DType type) {
  switch (type) {
    case DType::f64:
    case DType::i64: return 8;
    case DType::f32:
    case DType::i32: return 4;
    case DType::f16:
    case DType::bf16: return 2;
    case DType::i8:
    case DType::u8:
    case DType::f8_e4m3:
    case DType::f8_e5m2: return 1;
  }
  return 0;
}

// 8-bit numbers that keys and values may be kept in, with scales (core/codes.h).
constexpr bool is_code(DType type) { return type == DType::i8 || type == DType::f8_e4m3 || type == DType::f8_e5m2; }

constexpr std::string_view name_of(DType type) {
  switch (type) {
    case DType::f64: return "fp64";
    case DType::i64: return "int64";
    case DType::f32: return "fp32";
    case DType::i32: return "int32";
    case DType::f16: return "fp16";
    case DType::bf16: return "bf16";
    case DType::i8: return "int8";
    case DType::u8: return "uint8";
    case DType::f8_e4m3: return "fp8_e4m3";
    case DType::f8_e5m2: return "fp8_e5m2";
  }
  return "?";
}

inline float bf16_to_float(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// Round to nearest even; NaN stays NaN.
inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float f16_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu;
  const uint32_t mantissa = half & 0x3ffu;
  if (exponent == 0x1fu) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  // Zero and subnormals: mantissa * 2^-24 is exact in fp32.
  const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
  return sign ? -magnitude : magnitude;
}

// Round to nearest even; overflow becomes infinity; NaN stays NaN.
inline uint16_t float_to_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;
  if (magnitude < 0x38800000u) {  // below the smallest normal: let an fp32 addition do the rounding
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return sign | static_cast<uint16_t>(std::bit_cast<uint32_t>(shifted) - 0x3f000000u);
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return sign | static_cast<uint16_t>((rounded - 0x38000000u) >> 13);
}

}  // namespace maga
