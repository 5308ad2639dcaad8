// A lane's share of two units in shared memory, as the kernels for codes on Hopper and before it both read it: wgmma's operand from
// registers is, warp by warp, that of mma.sync.
#pragma once

#include "backends/cuda/linear_affine.h"
#include "backends/cuda/linear_affine_codes.cuh"

namespace maga::cuda {

__device__ __forceinline__ uint4 load_codes(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_half(uint32_t from) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(from) : "memory");
  return v;
}

__device__ __forceinline__ uint32_t load_word(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}

__device__ __forceinline__ float first_of(__nv_bfloat16, uint32_t two) { return __uint_as_float(two << 16); }
__device__ __forceinline__ float first_of(__half, uint32_t two) {
  return __half2float(__ushort_as_half(static_cast<uint16_t>(two)));
}

// Of a lane: its codes in the units of two rows, g and g + 8 of a tile of 16, and what makes numbers of them.
template <typename T, int kCode>
struct Lane {
  static constexpr int kWords = kCode == 4 ? 4 : 8, kCodeBytes = kWords * 128;
  uint32_t words[2][kWords];
  codes::Row rows[2];

  // `unit`: the address of the first; the second lies `next` bytes on.
  __device__ __forceinline__ void load(uint32_t unit, uint32_t next) {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int u = 0; u < 2; ++u)
#pragma unroll
      for (int part = 0; part < kWords / 4; ++part)
        *reinterpret_cast<uint4*>(&words[u][part * 4]) = load_codes(unit + u * next + part * 512 + lane * 16);
  }
  // For the pair-th 32 columns. kPlain: all of the unit has one set, and no shifts.
  template <bool kPlain, typename Args>
  __device__ __forceinline__ void load_set(const Args& a, uint32_t unit, uint32_t next, int pair) {
    static_assert(kPlain || kCode != kE4m3);
    if (kPlain && pair > 0) return;
    if constexpr (kCode == kE4m3) {
#pragma unroll
      for (int u = 0; u < 2; ++u) rows[u] = {load_word(unit + u * next + kCodeBytes + threadIdx.x % 32 / 4 * 4), 0, 0};
      return;
    }
    const uint32_t scales = unit + kCodeBytes + threadIdx.x % 32 / 4 * 2;
    const uint32_t at = kPlain ? scales : scales + pair * a.sets / 4 * 16;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      rows[u] = {codes::twice(load_half(at + u * next)), codes::kMiddle<T, kCode>, 0};
      if (kPlain) continue;
      const uint32_t shift = a.shift == AffineShift::none ? 0 : codes::twice(load_half(at + u * next + a.sets * 16));
      if (kCode == 4) rows[u].middle = a.shift == AffineShift::zeros ? shift : rows[u].middle;
      rows[u].offset = a.shift == AffineShift::offsets ? shift : 0;
    }
  }
  // What products of steps are scaled by.
  __device__ __forceinline__ float scale(int row) const {
    if constexpr (kCode == kE4m3) return __uint_as_float(rows[row].scale);
    return first_of(T{}, rows[row].scale);
  }
  // The tensor cores' operand for the at-th 16 columns: numbers or, kSteps, codes less their middle.
  template <bool kSteps>
  __device__ __forceinline__ void operand(uint32_t (&to)[4], int at) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const codes::Row& row = rows[i % 2];
      const uint32_t word = words[i % 2][kCode == 4 ? at / 2 : at];
      const int pair = kCode == 4 ? at % 2 * 2 + i / 2 : i / 2;
      to[i] = kSteps ? codes::step<T, kCode>(word, pair, row.middle) : codes::number<T, kCode>(word, pair, row);
    }
  }
};

}  // namespace maga::cuda
