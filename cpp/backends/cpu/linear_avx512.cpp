// Matrix kernels for AVX-512 without VNNI: integer sums as in linear_avx2.cpp, in vectors of twice the width.
#include <immintrin.h>

#include "backends/cpu/linear_kernels.h"

namespace maga::cpu {
namespace {

#include "backends/cpu/vectors_avx512.inl"

inline I sum_pairs(I sums) { return _mm512_madd_epi16(sums, _mm512_set1_epi16(1)); }

struct Nibbles {
  static constexpr int kColumns = 8, kTokensAtOnce = 16;
  I low, high;
  explicit Nibbles(const uint8_t* p) : low(low_nibbles(load_words(p))), high(high_nibbles(load_words(p))) {}

  struct Sum {
    I sum;  // 16-bit
    void begin(int32_t) { sum = _mm512_setzero_si512(); }
    void add(const Nibbles& c, const int8_t* x) {
      sum = _mm512_add_epi16(sum, _mm512_maddubs_epi16(c.low, broadcast4(x)));
      sum = _mm512_add_epi16(sum, _mm512_maddubs_epi16(c.high, broadcast4(x + 4)));
    }
    I total(int32_t start) const { return _mm512_add_epi32(sum_pairs(sum), _mm512_set1_epi32(start)); }
  };
};

struct Bytes {
  static constexpr int kColumns = 4, kTokensAtOnce = 8;
  I low, high;
  explicit Bytes(const uint8_t* p) : low(low_nibbles(load_words(p))), high(high_nibbles(load_words(p))) {}

  struct Sum {
    I low, high;  // 16-bit
    void begin(int32_t) { low = high = _mm512_setzero_si512(); }
    void add(const Bytes& c, const int8_t* x) {
      const I four = broadcast4(x);
      low = _mm512_add_epi16(low, _mm512_maddubs_epi16(c.low, four));
      high = _mm512_add_epi16(high, _mm512_maddubs_epi16(c.high, four));
    }
    I total(int32_t start) const {
      const I products = _mm512_add_epi32(sum_pairs(low), _mm512_slli_epi32(sum_pairs(high), 4));
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
