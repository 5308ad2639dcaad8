// Tokens to e4m3, where a linear of e4m3 weights reads them: a run of 128 or 512 columns of a token shares a scale, x ~ scale *
// code, so that outliers spoil no others. A scale for so few columns needs nothing but themselves, so that any kernel can round
// what it reads or writes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace maga::cuda {

constexpr int kStreamScaleColumns = 128;
constexpr float kLargestE4m3 = 448;

__device__ __forceinline__ float2 two_floats(__nv_bfloat16, uint32_t two) {
  return {__uint_as_float(two << 16), __uint_as_float(two & 0xFFFF0000u)};
}
__device__ __forceinline__ float2 two_floats(__half, uint32_t two) { return __half22float2(reinterpret_cast<const __half2&>(two)); }

// Columns [column, column + 16) of a token, as raw bits; `aligned`: to 16 bytes.
template <typename T>
__device__ __forceinline__ void load_16(const T* from, bool aligned, uint4 (&to)[2]) {
  if (aligned) {
    to[0] = reinterpret_cast<const uint4*>(from)[0], to[1] = reinterpret_cast<const uint4*>(from)[1];
    return;
  }
  const auto* bits = reinterpret_cast<const uint16_t*>(from);
  auto* const words = reinterpret_cast<uint32_t*>(to);
#pragma unroll
  for (int i = 0; i < 8; ++i) words[i] = bits[2 * i] | uint32_t{bits[2 * i + 1]} << 16;
}

// The bits of the largest of 2 * kWords columns of T without their signs, in either half; bits of positive floats are ordered as
// they are.
template <int kWords>
__device__ __forceinline__ uint32_t largest_of(const uint32_t* words) {
  uint32_t largest = words[0] & 0x7FFF7FFFu;
#pragma unroll
  for (int i = 1; i < kWords; ++i) largest = __vmaxu2(largest, words[i] & 0x7FFF7FFFu);
  return largest;
}

// The codes of 2 * kWords columns, where `largest` is of all that share their scale. What is not finite makes a NaN, as it would in
// a sum.
template <typename T, int kWords>
__device__ __forceinline__ void round_words(const uint32_t* words, uint32_t largest, float* scale, uint32_t (&codes)[kWords / 2]) {
  const float2 both = two_floats(T{}, largest);
  constexpr float kLeast = 1e-30f;  // for zeros, which any scale fits
  const float most = fmaxf(fmaxf(both.x, both.y), kLeast), inverse = __fdividef(kLargestE4m3, most);
  *scale = most * (1 / kLargestE4m3);
#pragma unroll
  for (int i = 0; i < kWords / 2; ++i) {
    const float2 a = two_floats(T{}, words[2 * i]), b = two_floats(T{}, words[2 * i + 1]);
    codes[i] = __nv_cvt_float2_to_fp8x2({a.x * inverse, a.y * inverse}, __NV_SATFINITE, __NV_E4M3) |
               uint32_t{__nv_cvt_float2_to_fp8x2({b.x * inverse, b.y * inverse}, __NV_SATFINITE, __NV_E4M3)} << 16;
  }
}

// Rounds 16 columns a lane of each of kTokens tokens; kLanes lanes together have the columns of a scale. All lanes of the warp must
// come. `x` becomes the codes, in its first half.
template <typename T, int kTokens, int kLanes>
__device__ __forceinline__ void quantize_16(uint4 (&x)[kTokens][2], float (&scale)[kTokens]) {
  uint32_t largest[kTokens];
#pragma unroll
  for (int t = 0; t < kTokens; ++t) largest[t] = largest_of<8>(reinterpret_cast<const uint32_t*>(x[t]));
#pragma unroll
  for (int lanes = 1; lanes < kLanes; lanes *= 2)
#pragma unroll
    for (int t = 0; t < kTokens; ++t) largest[t] = __vmaxu2(largest[t], __shfl_xor_sync(~0u, largest[t], lanes));
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    uint32_t codes[4];
    round_words<T, 8>(reinterpret_cast<const uint32_t*>(x[t]), largest[t], &scale[t], codes);
    x[t][0] = {codes[0], codes[1], codes[2], codes[3]};
  }
}

}  // namespace maga::cuda
