// What the row kernels share: 16-byte vectors of any type as floats, and a launch over all vectors of a matrix.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "backends/cuda/launch.cuh"
#include "backends/cuda/rows.h"

namespace maga::cuda {

__device__ __forceinline__ float widened(float x) { return x; }
__device__ __forceinline__ float widened(half x) { return __half2float(x); }
__device__ __forceinline__ float widened(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T narrowed(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else if constexpr (std::is_same_v<T, half>) {
    return __float2half_rn(x);
  } else {
    return __float2bfloat16_rn(x);
  }
}

template <typename T>
__device__ __forceinline__ float rounded(float x) {
  return widened(narrowed<T>(x));
}

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

// N elements as they lie in memory, moved in accesses of up to 16 bytes.
template <typename T, int N>
struct Vector {
  static constexpr int kBytes = N * sizeof(T);
  using Word = std::conditional_t<kBytes % 16 == 0, uint4,
                                  std::conditional_t<kBytes == 8, uint2, std::conditional_t<kBytes == 4, uint32_t, uint16_t>>>;
  static constexpr int kWords = kBytes / sizeof(Word);
  Word words[kWords];

  __device__ __forceinline__ void load(const T* from) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const Word*>(from)[i];
  }
  __device__ __forceinline__ void store(T* to) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) reinterpret_cast<Word*>(to)[i] = words[i];
  }
  __device__ __forceinline__ void get(float (&x)[N]) const {
    T elements[N];
    memcpy(elements, words, kBytes);
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = widened(elements[i]);
  }
  __device__ __forceinline__ void set(const float (&x)[N]) {
    T elements[N];
#pragma unroll
    for (int i = 0; i < N; ++i) elements[i] = narrowed<T>(x[i]);
    memcpy(words, elements, kBytes);
  }
};

template <typename T>
constexpr int kVector = 16 / sizeof(T);

// Where columns are: base + row * stride.
template <typename T>
struct Rows {
  T* data = nullptr;
  int64_t stride = 0;

  Rows() = default;
  explicit Rows(const Matrix& m) : data(static_cast<T*>(m.data)), stride(m.stride) {}
  __device__ __forceinline__ T* at(int64_t row, int column) const { return data + row * stride + column; }
};

// Where a thread's columns are in a row of the slabs: kRuns runs of N, `gap` elements apart.
struct SlabPlace {
  int64_t offset;
  int gap = 0;
};

// x += kCount slabs in order; all are asked for before the first is used.
template <int kCount, int N, int kRuns>
__device__ __forceinline__ void add_slabs(const float* at, int gap, int64_t slab_stride, float (&x)[kRuns][N]) {
  Vector<float, N> part[kCount][kRuns];
#pragma unroll
  for (int s = 0; s < kCount; ++s, at += slab_stride)
#pragma unroll
    for (int r = 0; r < kRuns; ++r) part[s][r].load(at + r * gap);
#pragma unroll
  for (int s = 0; s < kCount; ++s)
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      float y[N];
      part[s][r].get(y);
#pragma unroll
      for (int i = 0; i < N; ++i) x[r][i] += y[i];
    }
}

// x = sum of the slabs in order; kAhead (2, 4 or 8) of them are under way at a time.
template <int kAhead, int N, int kRuns>
__device__ __forceinline__ void sum_slabs(const float* slabs, int count, int64_t slab_stride, const SlabPlace& place,
                                          float (&x)[kRuns][N]) {
#pragma unroll
  for (int r = 0; r < kRuns; ++r)
#pragma unroll
    for (int i = 0; i < N; ++i) x[r][i] = 0;
  const float* at = slabs + place.offset;
  for (; count > kAhead; count -= kAhead, at += kAhead * slab_stride) add_slabs<kAhead>(at, place.gap, slab_stride, x);
  // No slab is asked for in vain: `count` is the same for all threads.
  auto rest = [&](auto slabs_left) { add_slabs<slabs_left()>(at, place.gap, slab_stride, x); };
  switch (count) {
    case 1: return rest(Constant<1>{});
    case 2: return rest(Constant<2>{});
  }
  if constexpr (kAhead >= 4) switch (count) {
      case 3: return rest(Constant<3>{});
      case 4: return rest(Constant<4>{});
    }
  if constexpr (kAhead >= 8) switch (count) {
      case 5: return rest(Constant<5>{});
      case 6: return rest(Constant<6>{});
      case 7: return rest(Constant<7>{});
      case 8: return rest(Constant<8>{});
    }
}

// --- host ---

// Whether rows of `width` elements can be read in vectors of `vector` elements.
template <typename T>
bool takes_vectors(const Matrix& m, int width, int vector) {
  return reinterpret_cast<uintptr_t>(m.data) % (vector * sizeof(T)) == 0 && m.stride % vector == 0 && width % vector == 0;
}
template <typename T>
bool takes_vectors(const void* row, int vector) {
  return reinterpret_cast<uintptr_t>(row) % (vector * sizeof(T)) == 0;
}

// body(T{}) for the compute type.
template <typename Body>
void with_type(DType type, Body&& body) {
  switch (type) {
    case DType::f32: return body(float{});
    case DType::f16: return body(half{});
    case DType::bf16: return body(__nv_bfloat16{});
    default: MAGA_CHECK(false, "rows of type ", name_of(type));
  }
}

}  // namespace maga::cuda
