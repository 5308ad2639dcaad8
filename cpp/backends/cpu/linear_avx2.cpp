// Matrix kernels for AVX2. Without an instruction for 4-byte dot products, pairs of products are summed in 16 bits: a unit of 32
// columns of 4-bit codes fits (8 * 2 * 15 * 127 < 2^15), and a byte counts as two such codes.
#include <immintrin.h>

#include "backends/cpu/linear_kernels.h"

namespace maga::cpu {
namespace {

constexpr int kLanes = 8;
constexpr int kQuantizedTile = 8, kExactTile = 6, kExactPanels = 1;
constexpr int kByteBias = 0;

using F = __m256;
using I = __m256i;

inline F set1(float x) { return _mm256_set1_ps(x); }
inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline F load_half(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline F load_bfloat(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
inline void store(float* p, F x) { _mm256_storeu_ps(p, x); }
inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F subtract(F a, F b) { return _mm256_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F divide(F a, F b) { return _mm256_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F negate(F x) { return _mm256_xor_ps(x, set1(-0.0f)); }
inline F absolute(F x) { return _mm256_andnot_ps(set1(-0.0f), x); }
// min and max return their second operand if either is NaN.
inline F clamp(F x, float low, float high) { return _mm256_min_ps(set1(high), _mm256_max_ps(set1(low), x)); }
inline F where_negative(F x, F yes, F no) { return _mm256_blendv_ps(no, yes, x); }
inline F to_float(I x) { return _mm256_cvtepi32_ps(x); }
inline I round_to_int(F x) { return _mm256_cvtps_epi32(x); }
inline F power_of_two(I n) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23)); }

inline I load_words(const void* p) { return _mm256_loadu_si256(static_cast<const I*>(p)); }
inline I bits_of(I words, int shift, int mask) {
  return _mm256_and_si256(_mm256_srli_epi32(words, shift), _mm256_set1_epi32(mask));
}

// Four activations in every lane.
inline I broadcast4(const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  return _mm256_set1_epi32(four);
}
inline I low_nibbles(I words) { return _mm256_and_si256(words, _mm256_set1_epi8(15)); }
inline I high_nibbles(I words) { return low_nibbles(_mm256_srli_epi16(words, 4)); }
// The empty statement holds the order: gcc reassociates vector additions, and then keeps all products of a unit on the stack.
inline void add_products(I& sum, I codes, I x) {
  sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, x));
  asm("" : "+x"(sum));
}
inline I sum_pairs(I sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }

struct Nibbles {
  static constexpr int kColumns = 8, kTokensAtOnce = 4;
  I low, high;
  static Nibbles load(const uint8_t* p) { return {low_nibbles(load_words(p)), high_nibbles(load_words(p))}; }

  struct Sum {
    I sum;  // 16-bit
    void begin(int32_t) { sum = _mm256_setzero_si256(); }
    void add(const Nibbles& c, const int8_t* x) {
      add_products(sum, c.low, broadcast4(x));
      add_products(sum, c.high, broadcast4(x + 4));
    }
    I total(int32_t start) const { return _mm256_add_epi32(sum_pairs(sum), _mm256_set1_epi32(start)); }
  };
};

struct Bytes {
  static constexpr int kColumns = 4, kTokensAtOnce = 2;
  I low, high;
  static Bytes load(const uint8_t* p) { return {low_nibbles(load_words(p)), high_nibbles(load_words(p))}; }

  struct Sum {
    I low, high;  // 16-bit
    void begin(int32_t) { low = high = _mm256_setzero_si256(); }
    void add(const Bytes& c, const int8_t* x) {
      const I four = broadcast4(x);
      add_products(low, c.low, four);
      add_products(high, c.high, four);
    }
    I total(int32_t start) const {
      const I products = _mm256_add_epi32(sum_pairs(low), _mm256_slli_epi32(sum_pairs(high), 4));
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
