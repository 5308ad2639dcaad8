// Matrix kernels for AVX-512 with VNNI: one instruction multiplies 16 rows by 4 activations and adds up.
#include <immintrin.h>

#include "backends/cpu/linear_kernels.h"

namespace maga::cpu {
namespace {

#include "backends/cpu/vec_avx512.inl"
// After the above:
#include "backends/cpu/vec_math.inl"

constexpr int kQuantizedTile = 16, kExactTile = 12, kExactPanels = 2;
constexpr int kByteBias = 0;

using Four = int32_t __attribute__((may_alias, aligned(1)));

// sum + codes . x, x the same four activations in every lane. Compilers load the broadcast into a register of its own, which
// costs an instruction for each product and, in a full tile, a spill.
inline Ints dot(Ints sum, Ints codes, const int8_t* x) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*reinterpret_cast<const Four*>(x)));
  return sum;
}

struct Nibbles {
  static constexpr int kColumns = 8, kTokensAtOnce = 4;
  Ints low, high;
  static Nibbles load(const uint8_t* p) { return {low_nibbles(p), high_nibbles(p)}; }

  struct Sum {
    Ints sum;
    void begin(int32_t start) { sum = _mm512_set1_epi32(start); }
    void add(const Nibbles& c, const int8_t* x) {
      sum = dot(sum, c.low, x);
      sum = dot(sum, c.high, x + 4);
    }
    Ints total(int32_t) const { return sum; }
  };
};

struct Bytes {
  static constexpr int kColumns = 4, kTokensAtOnce = 4;
  Ints codes;
  static Bytes load(const uint8_t* p) { return {load_words(p)}; }

  struct Sum {
    Ints sum;
    void begin(int32_t start) { sum = _mm512_set1_epi32(start); }
    void add(const Bytes& c, const int8_t* x) { sum = dot(sum, c.codes, x); }
    Ints total(int32_t) const { return sum; }
  };
};

#include "backends/cpu/linear_run.inl"
// After the above:
#include "backends/cpu/linear_exact.inl"
#include "backends/cpu/linear_quantized.inl"

}  // namespace

const IsaKernels kAvx512VnniKernels = {{kExactTile, prepare_exact, run_exact}, {kQuantizedTile, prepare_quantized, run_quantized}};

}  // namespace maga::cpu
