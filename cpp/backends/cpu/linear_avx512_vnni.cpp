// Matrix kernels for AVX-512 with VNNI: one instruction multiplies 16 rows by 4 activations and adds up.
#include <immintrin.h>

#include "backends/cpu/linear_kernels.h"

namespace maga::cpu {
namespace {

#include "backends/cpu/vectors_avx512.inl"

struct Nibbles {
  static constexpr int kColumns = 8, kTokensAtOnce = 16;
  I low, high;
  explicit Nibbles(const uint8_t* p) : low(low_nibbles(load_words(p))), high(high_nibbles(load_words(p))) {}

  struct Sum {
    I sum;
    void begin(int32_t start) { sum = _mm512_set1_epi32(start); }
    void add(const Nibbles& c, const int8_t* x) {
      sum = _mm512_dpbusd_epi32(sum, c.low, broadcast4(x));
      sum = _mm512_dpbusd_epi32(sum, c.high, broadcast4(x + 4));
    }
    I total(int32_t) const { return sum; }
  };
};

struct Bytes {
  static constexpr int kColumns = 4, kTokensAtOnce = 16;
  I codes;
  explicit Bytes(const uint8_t* p) : codes(load_words(p)) {}

  struct Sum {
    I sum;
    void begin(int32_t start) { sum = _mm512_set1_epi32(start); }
    void add(const Bytes& c, const int8_t* x) { sum = _mm512_dpbusd_epi32(sum, c.codes, broadcast4(x)); }
    I total(int32_t) const { return sum; }
  };
};

#include "backends/cpu/linear_run.inl"
// After the above:
#include "backends/cpu/linear_exact.inl"
#include "backends/cpu/linear_quantized.inl"

}  // namespace

const IsaKernels kAvx512VnniKernels = {{kExactTile, prepare_exact, run_exact}, {kQuantizedTile, prepare_quantized, run_quantized}};

}  // namespace maga::cpu
