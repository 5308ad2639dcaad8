// The vocabulary in which kernels are written. Each instruction set has a vec_<isa>.inl, included inside the unnamed namespace of
// a translation unit that is compiled for that set, and vec_math.inl after it. They define, alike everywhere:
//   Vec, Ints          kLanes floats, kLanes 32-bit integers; Vec has the operators + - * /
//   broadcast, load, store (fp32, fp16, bf16), load_first, store_first (of n lanes)
//   fma, max_with, min_with, absolute, round_even, scale_by_power, zero_where_less, select_negative
//   keep_lanes, swap_pairs, sum_lanes, max_lanes
//   load_words, bits_of, to_float; but for the generic set, low_nibbles, high_nibbles and broadcast4 of bytes
//   exp2, exp and the activations
// Plain structs and internal functions only, here and in every header of kernels: these are compiled into each instruction set's
// translation units, and a shared function emitted there could be linked in for a machine without that set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "program/ops.h"

namespace maga::cpu {

// 16-bit floats in memory.
struct F16 {
  uint16_t bits;
};
struct BF16 {
  uint16_t bits;
};

}  // namespace maga::cpu
