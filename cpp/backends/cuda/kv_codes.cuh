// 8-bit codes of keys and values on the card: pairs of them as fp16 numbers for tensor cores, and one by one. In pages int8 codes
// lie with 128 added.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/codes.h"

namespace maga::cuda {

struct Code {
  uint8_t bits;
};

__device__ __forceinline__ float code_to_float(DType type, Code code) {
  if (type == DType::i8) return static_cast<float>(static_cast<int>(code.bits) - 128);
  return type == DType::f8_e4m3 ? e4m3_to_float(code.bits) : e5m2_to_float(code.bits);
}
// Of a number that was multiplied with code_inverse of its scale.
__device__ __forceinline__ uint8_t float_to_code(DType type, float x) {
  if (type == DType::i8) return static_cast<uint8_t>(__float2int_rn(x) + 128);
  return type == DType::f8_e4m3 ? float_to_e4m3(x) : float_to_e5m2(x);
}

// Of the bits of a bf16 number.
__device__ __forceinline__ float scale_to_float(uint32_t bits) { return __uint_as_float(bits << 16); }

// What the numbers of code_pair are to be multiplied with.
template <DType kType>
__device__ __forceinline__ constexpr float code_unit() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 890
  if (kType == DType::f8_e4m3) return 256;
#endif
  return 1;
}

// Bytes kFirst and kSecond of x as two fp16 numbers, the first in the lower half.
template <DType kType, int kFirst, int kSecond>
__device__ __forceinline__ uint32_t code_pair(uint32_t x) {
  if constexpr (kType == DType::i8) {
    // A byte below the exponent of 1024 is that much more than 1024.
    const uint32_t shifted = __byte_perm(x, 0x64646464u, kFirst | 4 << 4 | kSecond << 8 | 4 << 12);
    const __half2 pair =
        __hsub2(reinterpret_cast<const __half2&>(shifted), __half2(__ushort_as_half(0x6480), __ushort_as_half(0x6480)));
    return reinterpret_cast<const uint32_t&>(pair);
  } else if constexpr (kType == DType::f8_e5m2) {
    return __byte_perm(x, 0, 4 | kFirst << 4 | 4 << 8 | kSecond << 12);
  } else {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint32_t pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(__byte_perm(x, 0, kFirst | kSecond << 4))));
    return pair;
#else
    const uint32_t high = __byte_perm(x, 0, 4 | kFirst << 4 | 4 << 8 | kSecond << 12);
    return (high & 0x80008000u) | (high >> 1 & 0x3f803f80u);
#endif
  }
}

// The largest magnitude of numbers, as its bits, so that NaN counts as larger than all others.
__device__ __forceinline__ uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// The bits of the scale of numbers up to this magnitude; see code_scale.
__device__ __forceinline__ uint16_t scale_of_codes(DType type, uint32_t magnitude, float given) {
  return code_scale(__uint_as_float(magnitude), largest_code(type), type == DType::f8_e4m3 ? given : 0);
}

// Codes of neighbouring numbers, stored together. `scale` is theirs.
template <int N>
__device__ __forceinline__ void store_codes(DType type, const float (&x)[N], float scale, Code* to) {
  static_assert(N == 1 || N == 4 || N == 8);
  const float inverse = code_inverse(scale);
  uint32_t words[(N + 3) / 4] = {};
#pragma unroll
  for (int i = 0; i < N; ++i)  // nothing is known of numbers whose scale is not finite
    words[i / 4] |= static_cast<uint32_t>(float_to_code(type, inverse == 0 ? 0 : x[i] * inverse)) << i % 4 * 8;
  if constexpr (N == 1) {
    to->bits = static_cast<uint8_t>(words[0]);
  } else if constexpr (N == 4) {
    *reinterpret_cast<uint32_t*>(to) = words[0];
  } else {
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  }
}

}  // namespace maga::cuda
