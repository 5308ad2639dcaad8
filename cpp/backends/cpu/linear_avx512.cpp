// Matrix kernels for AVX-512 without VNNI: integer sums as in linear_avx2.cpp, in vectors of twice the width.
#include <immintrin.h>

#include "backends/cpu/linear_kernels.h"

namespace maga::cpu {
namespace {

#include "backends/cpu/vec_avx512.inl"
// After the above:
#include "backends/cpu/vec_math.inl"

constexpr int kQuantizedTile = 16, kExactTile = 12, kExactPanels = 2;
constexpr int kByteBias = 0;

// The empty statement holds the order: gcc reassociates vector additions, and then keeps all products of a unit on the stack.
inline void add_products(Ints& sum, Ints codes, Ints x) {
  sum = _mm512_add_epi16(sum, _mm512_maddubs_epi16(codes, x));
  asm("" : "+v"(sum));
}
inline Ints sum_pairs(Ints sums) { return _mm512_madd_epi16(sums, _mm512_set1_epi16(1)); }

struct Nibbles {
  static constexpr int kColumns = 8, kTokensAtOnce = 4;
  Ints low, high;
  static Nibbles load(const uint8_t* p) { return {low_nibbles(p), high_nibbles(p)}; }

  struct Sum {
    Ints sum;  // 16-bit
    void begin(int32_t) { sum = _mm512_setzero_si512(); }
    void add(const Nibbles& c, const int8_t* x) {
      add_products(sum, c.low, broadcast4(x));
      add_products(sum, c.high, broadcast4(x + 4));
    }
    Ints total(int32_t start) const { return _mm512_add_epi32(sum_pairs(sum), _mm512_set1_epi32(start)); }
  };
};

struct Bytes {
  static constexpr int kColumns = 4, kTokensAtOnce = 4;
  Ints low, high;
  static Bytes load(const uint8_t* p) { return {low_nibbles(p), high_nibbles(p)}; }

  struct Sum {
    Ints low, high;  // 16-bit
    void begin(int32_t) { low = high = _mm512_setzero_si512(); }
    void add(const Bytes& c, const int8_t* x) {
      const Ints four = broadcast4(x);
      add_products(low, c.low, four);
      add_products(high, c.high, four);
    }
    Ints total(int32_t start) const {
      const Ints products = _mm512_add_epi32(sum_pairs(low), _mm512_slli_epi32(sum_pairs(high), 4));
      return _mm512_add_epi32(products, _mm512_set1_epi32(start));
    }
  };
};

#include "backends/cpu/linear_run.inl"
// After the above:
#include "backends/cpu/linear_exact.inl"
#include "backends/cpu/linear_quantized.inl"

}  // namespace

const IsaKernels kAvx512Kernels = {{kExactTile, prepare_exact, run_exact}, {kQuantizedTile, prepare_quantized, run_quantized}};

}  // namespace maga::cpu
