// Matrix kernels for AVX2. Without an instruction for 4-byte dot products, pairs of products are summed in 16 bits: a unit of 32
// columns of 4-bit codes fits (8 * 2 * 15 * 127 < 2^15), and a byte counts as two such codes.
#include <immintrin.h>

#include "backends/cpu/linear_kernels.h"

namespace maga::cpu {
namespace {

#include "backends/cpu/vec_avx2.inl"
// After the above:
#include "backends/cpu/vec_math.inl"

constexpr int kQuantizedTile = 8, kExactTile = 6, kExactPanels = 1;
constexpr int kByteBias = 0;

// The empty statement holds the order: gcc reassociates vector additions, and then keeps all products of a unit on the stack.
inline void add_products(Ints& sum, Ints codes, Ints x) {
  sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, x));
  asm("" : "+x"(sum));
}
inline Ints sum_pairs(Ints sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }

struct Nibbles {
  static constexpr int kColumns = 8, kTokensAtOnce = 4;
  Ints low, high;
  static Nibbles load(const uint8_t* p) { return {low_nibbles(p), high_nibbles(p)}; }

  struct Sum {
    Ints sum;  // 16-bit
    void begin(int32_t) { sum = _mm256_setzero_si256(); }
    void add(const Nibbles& c, const int8_t* x) {
      add_products(sum, c.low, broadcast4(x));
      add_products(sum, c.high, broadcast4(x + 4));
    }
    Ints total(int32_t start) const { return _mm256_add_epi32(sum_pairs(sum), _mm256_set1_epi32(start)); }
  };
};

struct Bytes {
  static constexpr int kColumns = 4, kTokensAtOnce = 2;
  Ints low, high;
  static Bytes load(const uint8_t* p) { return {low_nibbles(p), high_nibbles(p)}; }

  struct Sum {
    Ints low, high;  // 16-bit
    void begin(int32_t) { low = high = _mm256_setzero_si256(); }
    void add(const Bytes& c, const int8_t* x) {
      const Ints four = broadcast4(x);
      add_products(low, c.low, four);
      add_products(high, c.high, four);
    }
    Ints total(int32_t start) const {
      const Ints products = _mm256_add_epi32(sum_pairs(low), _mm256_slli_epi32(sum_pairs(high), 4));
      return _mm256_add_epi32(products, _mm256_set1_epi32(start));
    }
  };
};

#include "backends/cpu/linear_run.inl"
// After the above:
#include "backends/cpu/linear_exact.inl"
#include "backends/cpu/linear_quantized.inl"

}  // namespace

const IsaKernels kAvx2Kernels = {{kExactTile, prepare_exact, run_exact}, {kQuantizedTile, prepare_quantized, run_quantized}};

}  // namespace maga::cpu
