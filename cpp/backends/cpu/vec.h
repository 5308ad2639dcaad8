// The vocabulary in which kernels are written. Each instruction set has a vec_<isa>.inl, included inside the unnamed namespace of
// a translation unit that is compiled for that set, and vec_math.inl after it. They define, alike everywhere:
//   Vec, Ints          kLanes floats, kLanes 32-bit integers; Vec has the operators + - * /
//   broadcast, load (fp32, fp16, bf16, codes), store (fp32, fp16, bf16), load_first, store_first (of n lanes)
//   fma, max_with, min_with, absolute, round_even, scale_by_power, zero_where_less, select_negative
//   keep_lanes, swap_pairs, sum_lanes, max_lanes
//   load_words, bits_of, to_float; but for the generic set, low_nibbles, high_nibbles and broadcast4 of bytes
//   exp2, exp and the activations
// Plain structs and internal functions only, here and in every header of kernels: these are compiled into each instruction set's
// translation units, and a shared function emitted there could be linked in for a machine without that set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/codes.h"
#include "program/ops.h"

namespace maga::cpu {

// 16-bit floats in memory.
struct F16 {
  uint16_t bits;
};
struct BF16 {
  uint16_t bits;
};

// 8-bit codes in memory, see core/codes.h. load() gives what they stand for divided by kUnit.
struct I8 {
  int8_t bits;
  static constexpr DType kType = DType::i8;
  static constexpr float kUnit = 1;
};
struct E4M3 {  // with zeros behind it, the code is the fp16 number 2^-8 times as large
  uint8_t bits;
  static constexpr DType kType = DType::f8_e4m3;
  static constexpr float kUnit = 256;
};
struct E5M2 {  // the upper half of an fp16 number
  uint8_t bits;
  static constexpr DType kType = DType::f8_e5m2;
  static constexpr float kUnit = 1;
};
template <typename E>
constexpr bool kCoded = sizeof(E) == 1;

}  // namespace maga::cpu
