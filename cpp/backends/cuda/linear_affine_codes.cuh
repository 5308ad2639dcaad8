// From codes to numbers, in registers. With g = lane / 4 and t = lane % 4 a lane's codes of a unit are those of row g; of each 16
// columns it has pairs 2 t + {0, 1} and 8 + 2 t + {0, 1}.
//
// 4 bits: a word has two times 16 columns. Bits 4 i and 16 + 4 i on hold the two codes of pair i, so a shift, an and, an or make
// them two numbers 2^7 + code (bf16) or 2^10 + code (fp16). 8 bits: a word has 16 columns, bytes 0 and 2 its first pair and bytes 1
// and 3 the second. Codes of e4m3 lie as those of 8 bits do; their scale is a factor in fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "backends/cuda/linear_affine.h"

namespace maga::cuda::codes {

// (v & mask) | bits: written out, as the compiler makes two instructions of it.
__device__ __forceinline__ uint32_t and_or(uint32_t v, uint32_t mask, uint32_t bits) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(v), "r"(mask), "r"(bits));
  return r;
}
// (~v & mask) | bits
__device__ __forceinline__ uint32_t not_and_or(uint32_t v, uint32_t mask, uint32_t bits) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xAE;" : "=r"(r) : "r"(v), "r"(mask), "r"(bits));
  return r;
}
__device__ __forceinline__ uint32_t subtract(__nv_bfloat16, uint32_t a, uint32_t b) {
  uint32_t r;
#if __CUDA_ARCH__ >= 900
  asm("sub.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(b), "r"(0xBF80BF80u), "r"(a));  // b * -1 + a
#endif
  return r;
}
__device__ __forceinline__ uint32_t subtract(__half, uint32_t a, uint32_t b) {
  uint32_t r;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ uint32_t multiply_add(__nv_bfloat16, uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
__device__ __forceinline__ uint32_t multiply_add(__half, uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
__device__ __forceinline__ uint32_t twice(uint32_t half) { return half * 0x10001u; }

// What makes numbers of the codes of one row and set, each value twice: (code - middle) * scale + offset.
struct Row {  // of e4m3: `scale` once, in fp32
  uint32_t scale, middle, offset;
};

// 2^7 + 8 and the like, as the numbers that codes are read as.
template <typename T, int kBits>
constexpr uint32_t kMiddle = sizeof(T) != 2 ? 0 : (kBits == 4 ? 0x43084308u : 0x43804380u);
template <>
constexpr uint32_t kMiddle<__half, 4> = 0x64086408u;
template <>
constexpr uint32_t kMiddle<__half, 8> = 0x64806480u;

// Of e4m3, its bits where T has exponent and mantissa are the number over 2^120 (bf16) or 2^8 (fp16), subnormal ones too.
template <typename T>
__device__ __forceinline__ uint32_t float8(uint32_t word, int i) {
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  const uint32_t bytes = i == 0 ? word << 8 : word;  // the upper ones of each half
  const uint32_t size = kBf16 ? bytes >> 4 & 0x07F007F0u : bytes >> 1 & 0x3F803F80u;
  return multiply_add(T{}, and_or(bytes, 0x80008000u, size), kBf16 ? 0x7B807B80u : 0x5C005C00u, 0x80008000u);
}

// Pair i (0 to 3 at 4 bits, 0 or 1 at 8) of a word: code - middle, exactly; of e4m3, what it stands for.
template <typename T, int kBits>
__device__ __forceinline__ uint32_t step(uint32_t word, int i, uint32_t middle) {
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  if constexpr (kBits == kE4m3) {
    return float8<T>(word, i);
  } else if constexpr (kBits == 4) {
    return subtract(T{}, and_or(word >> (4 * i), 0x000F000Fu, kBf16 ? 0x43004300u : 0x64006400u), middle);
  } else if constexpr (kBf16) {
    // bf16 has room for 7 of the 8 bits: 128 + those, less 256, or less 128 where the highest bit is set.
    const uint32_t bytes = word >> (8 * i);
    return subtract(T{}, and_or(bytes, 0x007F007Fu, 0x43004300u), not_and_or(bytes, 0x00800080u, 0x43004300u));
  } else {
    return subtract(T{}, and_or(word >> (8 * i), 0x00FF00FFu, 0x64006400u), middle);
  }
}

__device__ __forceinline__ uint32_t times(__nv_bfloat16, uint32_t two, float scale) {
  const float2 numbers = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(two));
  const __nv_bfloat162 product = __floats2bfloat162_rn(numbers.x * scale, numbers.y * scale);
  return reinterpret_cast<const uint32_t&>(product);
}
__device__ __forceinline__ uint32_t times(__half, uint32_t two, float scale) {
  const float2 numbers = __half22float2(reinterpret_cast<const __half2&>(two));
  const __half2 product = __floats2half2_rn(numbers.x * scale, numbers.y * scale);
  return reinterpret_cast<const uint32_t&>(product);
}

// The same pair as numbers.
template <typename T, int kBits>
__device__ __forceinline__ uint32_t number(uint32_t word, int i, const Row& row) {
  if constexpr (kBits == kE4m3) return times(T{}, step<T, kBits>(word, i, 0), __uint_as_float(row.scale));
  return multiply_add(T{}, step<T, kBits>(word, i, row.middle), row.scale, row.offset);
}

}  // namespace maga::cuda::codes
