// Codes into units, and units back into rows of numbers.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <type_traits>

#include "backends/cuda/launch.cuh"
#include "backends/cuda/linear_affine.h"
#include "backends/cuda/linear_affine_codes.cuh"

namespace maga::cuda {
namespace {

constexpr int kThreads = 256;

// The codes between which zero lies in a packing of 4 or 8 bits.
constexpr int middle_of(int bits) { return 1 << (bits - 1); }

// The code of the value 0 of a group, if there is one: zero - offset / scale.
__host__ __device__ inline float zero_of(float scale, float offset, int zero) {
  return scale == 0 || offset == 0 ? static_cast<float>(zero) : static_cast<float>(zero) - offset / scale;
}

struct Place {
  int64_t unit;
  int lane, g, t;
  int64_t row, column;  // of the lane's row, and the unit's first column
};
__device__ __forceinline__ Place place_of(int64_t across) {
  const int64_t unit = blockIdx.x * int64_t{kThreads / 32} + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  return {unit, lane, lane / 4, lane % 4, unit / across * kUnitRows + lane / 4, unit % across * kUnitColumns};
}

template <typename T>
__global__ void pack(AffineRows from, AffineLayout layout, int64_t units, uint8_t* to) {
  const int64_t across = affine_units(from.cols, kUnitColumns), groups = from.cols / from.group;
  const Place at = place_of(across);
  if (at.unit >= units) return;
  const int middle = middle_of(layout.bits), set_columns = kUnitColumns / layout.sets;
  uint8_t* const unit = to + at.unit * affine_unit_bytes(layout);
  // The group of a set of this row; -1: outside.
  auto group_of = [&](int64_t row, int set) {
    const int64_t column = at.column + set * set_columns;
    return row < from.rows && column < from.cols ? row * groups + column / from.group : int64_t{-1};
  };
  auto offset_of = [&](int64_t group) { return from.offset ? from.offset[group] : 0.f; };
  auto zero_at = [&](int64_t group) { return __float2int_rn(zero_of(from.scale[group], offset_of(group), from.zero)); };
  auto code = [&](int column) -> uint32_t {
    const int64_t group = group_of(at.row, column / set_columns);
    if (group < 0 || at.column + column >= from.cols) return middle;
    const int given = from.codes[at.row * from.cols + at.column + column];
    return layout.shift == AffineShift::none ? given - zero_at(group) + middle : given;
  };
  if (layout.bits == 4) {
    uint32_t words[4] = {};
    for (int step = 0; step < 8; ++step)
      for (int pair = 0; pair < 2; ++pair)
        for (int i = 0; i < 2; ++i)
          words[step / 2] |= code(step * 16 + pair * 8 + at.t * 2 + i) << (i * 16 + (step % 2 * 2 + pair) * 4);
    reinterpret_cast<uint4*>(unit)[at.lane] = *reinterpret_cast<uint4*>(words);
  } else {
    uint32_t words[8] = {};
    for (int step = 0; step < 8; ++step)
      for (int pair = 0; pair < 2; ++pair)
        for (int i = 0; i < 2; ++i) words[step] |= code(step * 16 + pair * 8 + at.t * 2 + i) << (i * 16 + pair * 8);
    reinterpret_cast<uint4*>(unit)[at.lane] = *reinterpret_cast<uint4*>(words);
    reinterpret_cast<uint4*>(unit)[32 + at.lane] = *reinterpret_cast<uint4*>(words + 4);
  }
  T* const scales = reinterpret_cast<T*>(unit + affine_code_bytes(layout));
  for (int i = at.lane; i < layout.sets * kUnitRows; i += 32) {
    const int64_t group = group_of(at.row - at.g + i % kUnitRows, i / kUnitRows);
    const float scale = group < 0 ? 0.f : from.scale[group];
    scales[i] = static_cast<T>(scale);
    if (layout.shift == AffineShift::none) continue;
    const float read_as = std::is_same_v<T, __half> ? 1024.f : 128.f;  // what a code of 0 is read as
    float shift = layout.shift == AffineShift::zeros ? read_as + static_cast<float>(middle) : 0.f;
    if (group >= 0)
      shift = layout.shift == AffineShift::zeros ? read_as + static_cast<float>(zero_at(group))
                                                 : offset_of(group) + static_cast<float>(middle - from.zero) * scale;
    scales[layout.sets * kUnitRows + i] = static_cast<T>(shift);
  }
}

template <typename T, int kBits>
__device__ __forceinline__ codes::Row row_of(const uint8_t* unit, const AffineLayout& layout, int set, int g) {
  if constexpr (kBits == kE4m3) return {reinterpret_cast<const uint32_t*>(unit + affine_code_bytes(layout))[g], 0, 0};
  const auto* const scales = reinterpret_cast<const uint16_t*>(unit + affine_code_bytes(layout)) + set * kUnitRows + g;
  codes::Row row{codes::twice(scales[0]), codes::kMiddle<T, kBits>, 0};
  if (layout.shift != AffineShift::none) {
    const uint32_t shift = codes::twice(scales[layout.sets * kUnitRows]);
    (kBits == 4 && layout.shift == AffineShift::zeros ? row.middle : row.offset) = shift;
  }
  return row;
}

// Among four neighbouring lanes: lane t gets word t of each.
__device__ __forceinline__ void transpose(uint32_t (&v)[4], int t) {
  auto exchange = [&](uint32_t& low, uint32_t& high, int bit) {
    const uint32_t got = __shfl_xor_sync(~0u, t & bit ? low : high, bit);
    (t & bit ? low : high) = got;
  };
  exchange(v[0], v[1], 1);
  exchange(v[2], v[3], 1);
  exchange(v[0], v[2], 2);
  exchange(v[1], v[3], 2);
}

template <typename T, int kBits>
__global__ void unpack(const uint8_t* from, AffineLayout layout, int64_t units, int64_t rows, int64_t cols, T* to) {
#if __CUDA_ARCH__ >= 800
  allow_next();
  wait_for_previous();
  constexpr int kWords = kBits == 4 ? 4 : 8;
  const Place at = place_of(affine_units(cols, kUnitColumns));
  if (at.unit >= units) return;
  const uint8_t* const unit = from + at.unit * affine_unit_bytes(layout);
  uint32_t words[kWords];
#pragma unroll
  for (int part = 0; part < kWords / 4; ++part)
    *reinterpret_cast<uint4*>(words + part * 4) = reinterpret_cast<const uint4*>(unit)[part * 32 + at.lane];
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {  // of 16 columns
    uint32_t numbers[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int step = pair * 2 + i / 2;
      const codes::Row row = row_of<T, kBits>(unit, layout, step * layout.sets / 8, at.g);
      numbers[i] = kBits == 4 ? codes::number<T, kBits>(words[step / 2], step % 2 * 2 + i % 2, row)
                              : codes::number<T, kBits>(words[step], i % 2, row);
    }
    transpose(numbers, at.t);
    const int64_t column = at.column + pair * 32 + at.t * 8;
    if (at.row >= rows) continue;
    T* const here = to + at.row * cols + column;
    if (cols % 8 == 0) {
      if (column < cols) *reinterpret_cast<uint4*>(here) = *reinterpret_cast<uint4*>(numbers);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (column + i < cols) here[i] = reinterpret_cast<const T*>(numbers)[i];
    }
  }
#endif
}

template <typename T, int kBits>
__global__ void embed(EmbedArgs a, AffineLayout layout, const int32_t* ids, const int32_t* chosen) {
#if __CUDA_ARCH__ >= 800
  allow_next();
  wait_for_previous();
  const auto* const units = static_cast<const uint8_t*>(a.table);
  int id = ids[blockIdx.x];
  if (id < 0) id = chosen[-1 - id];
  T* const out = static_cast<T*>(a.out.data) + blockIdx.x * a.out.stride;
  if (id >= a.vocab) {
    for (int column = threadIdx.x; column < a.width; column += kThreads)
      out[column] = static_cast<const T*>(a.virtual_table)[int64_t{id - a.vocab} * a.width + column];
    return;
  }
  const int64_t across = affine_units(a.width, kUnitColumns);
  for (int column = threadIdx.x * 2; column < a.width; column += kThreads * 2) {
    const int in = column % kUnitColumns, step = in / 16, pair = in % 16 / 8, lane = id % kUnitRows * 4 + in % 8 / 2;
    const uint8_t* const unit = units + (id / kUnitRows * across + column / kUnitColumns) * affine_unit_bytes(layout);
    const auto* const words = reinterpret_cast<const uint32_t*>(unit);
    const codes::Row row = row_of<T, kBits>(unit, layout, step * layout.sets / 8, id % kUnitRows);
    const uint32_t two = kBits == 4 ? codes::number<T, kBits>(words[lane * 4 + step / 2], step % 2 * 2 + pair, row)
                                    : codes::number<T, kBits>(words[step / 4 * 128 + lane * 4 + step % 4], pair, row);
    for (int i = 0; i < 2 && column + i < a.width; ++i)
      out[column + i] = static_cast<T>(static_cast<float>(reinterpret_cast<const T*>(&two)[i]) * a.scale);
  }
#endif
}

unsigned blocks_of(int64_t units) { return static_cast<unsigned>((units + kThreads / 32 - 1) / (kThreads / 32)); }

}  // namespace

AffineLayout affine_layout(const Affine& weight, DType type, std::string* why) {
  const int64_t cols = weight.codes.shape[1];
  AffineLayout layout{.bits = weight.bits <= 4 ? 4 : 8};
  for (layout.sets = 1; layout.sets <= 4 && weight.group != cols; layout.sets *= 2)
    if (weight.group % (kUnitColumns / layout.sets) == 0) break;
  if (layout.sets > 4) {
    *why = concat("groups of ", weight.group, " columns");
    return {};
  }
  const float* const scale = weight.scale.as<float>();
  const float* const offset = weight.offset.empty() ? nullptr : weight.offset.as<float>();
  const int64_t count = weight.scale.elements();
  // fp16 has less of its precision left below.
  constexpr float kLeast = 6.2e-5f, kMost = 65504.f;
  bool whole = true, alike = true;
  for (int64_t i = 0; i < count; ++i) {
    const float size = std::fabs(scale[i]);
    if (type == DType::f16 && ((size != 0 && size < kLeast) || size > kMost)) {
      *why = "scales that fp16 has no room for";
      return {};
    }
    const float zero = zero_of(scale[i], offset ? offset[i] : 0.f, weight.zero), nearest = std::nearbyint(zero);
    whole = whole && std::fabs(zero - nearest) <= 1e-3f && nearest >= 0 && nearest < static_cast<float>(1 << weight.bits) &&
            (size != 0 || !offset || offset[i] == 0);
    alike = alike && nearest == static_cast<float>(middle_of(layout.bits));
  }
  if (whole && (weight.bits < layout.bits || alike))
    layout.shift = AffineShift::none;
  else
    layout.shift = whole && layout.bits == 4 ? AffineShift::zeros : AffineShift::offsets;
  return layout;
}

void affine_pack(cudaStream_t stream, DType type, const AffineLayout& layout, const AffineRows& from, void* units) {
  const int64_t count = affine_units(from.rows, kUnitRows) * affine_units(from.cols, kUnitColumns);
  launch({stream, false}, type == DType::bf16 ? pack<__nv_bfloat16> : pack<__half>, dim3(blocks_of(count)), dim3(kThreads), 0, from,
         layout, count, static_cast<uint8_t*>(units));
}

void affine_unpack(const Queue& queue, DType type, const AffineLayout& layout, const void* units, int64_t first, int64_t rows,
                   int64_t cols, void* to) {
  MAGA_CHECK(first % kUnitRows == 0, "row ", first, " is inside of a unit");
  const int64_t across = affine_units(cols, kUnitColumns), count = affine_units(rows, kUnitRows) * across;
  const auto* const from = static_cast<const uint8_t*>(units) + first / kUnitRows * across * affine_unit_bytes(layout);
  auto with = [&]<typename T>(T) {
    launch(queue,
           layout.bits == kE4m3 ? unpack<T, kE4m3>
           : layout.bits == 4   ? unpack<T, 4>
                                : unpack<T, 8>,
           dim3(blocks_of(count)), dim3(kThreads), 0, from, layout, count, rows, cols, static_cast<T*>(to));
  };
  type == DType::bf16 ? with(__nv_bfloat16{}) : with(__half{});
}

void affine_embed(const Queue& queue, DType type, const AffineLayout& layout, const DeviceStep& step, const EmbedArgs& args) {
  if (step.tokens == 0) return;
  auto with = [&]<typename T>(T) {
    launch(queue,
           layout.bits == kE4m3 ? embed<T, kE4m3>
           : layout.bits == 4   ? embed<T, 4>
                                : embed<T, 8>,
           dim3(step.tokens), dim3(kThreads), 0, args, layout, step.ids, step.chosen);
  };
  type == DType::bf16 ? with(__nv_bfloat16{}) : with(__half{});
}

}  // namespace maga::cuda
