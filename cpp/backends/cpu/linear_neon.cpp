// Matrix kernels for 64-bit Arm. Products are summed in 16 bits (8 * 15 * 127 < 2^15); a byte counts as two 4-bit codes.
#include <arm_neon.h>

#include "backends/cpu/linear_kernels.h"

namespace maga::cpu {
namespace {

#include "backends/cpu/vec_neon.inl"
// After the above:
#include "backends/cpu/vec_math.inl"

constexpr int kQuantizedTile = 8, kExactTile = 6, kExactPanels = 1;
constexpr int kByteBias = 0;

// Sums of 4 rows, in 16 bits, each in 4 parts.
struct PartSums {
  int16x8_t first, second;  // rows 0 and 1, rows 2 and 3
  void begin() { first = second = vdupq_n_s16(0); }
  void add(int8x16_t codes, int8x16_t x) {
    first = vmlal_s8(first, vget_low_s8(codes), vget_low_s8(x));
    second = vmlal_high_s8(second, codes, x);
  }
  Ints total() const { return vpaddq_s32(vpaddlq_s16(first), vpaddlq_s16(second)); }
};

struct Nibbles {
  static constexpr int kColumns = 8, kTokensAtOnce = 2;
  int8x16_t low, high;
  static Nibbles load(const uint8_t* p) { return {low_nibbles(p), high_nibbles(p)}; }

  struct Sum {
    PartSums sum;
    void begin(int32_t) { sum.begin(); }
    void add(const Nibbles& c, const int8_t* x) {
      sum.add(c.low, broadcast4(x));
      sum.add(c.high, broadcast4(x + 4));
    }
    Ints total(int32_t start) const { return vaddq_s32(sum.total(), vdupq_n_s32(start)); }
  };
};

struct Bytes {
  static constexpr int kColumns = 4, kTokensAtOnce = 1;
  int8x16_t low, high;
  static Bytes load(const uint8_t* p) { return {low_nibbles(p), high_nibbles(p)}; }

  struct Sum {
    PartSums low, high;
    void begin(int32_t) {
      low.begin();
      high.begin();
    }
    void add(const Bytes& c, const int8_t* x) {
      const int8x16_t four = broadcast4(x);
      low.add(c.low, four);
      high.add(c.high, four);
    }
    Ints total(int32_t start) const { return vaddq_s32(vaddq_s32(low.total(), vshlq_n_s32(high.total(), 4)), vdupq_n_s32(start)); }
  };
};

#include "backends/cpu/linear_run.inl"
// After the above:
#include "backends/cpu/linear_exact.inl"
#include "backends/cpu/linear_quantized.inl"

}  // namespace

const IsaKernels kNeonKernels = {{kExactTile, prepare_exact, run_exact}, {kQuantizedTile, prepare_quantized, run_quantized}};

}  // namespace maga::cpu
