// Matrix kernels for 64-bit Arm with dot products (Armv8.2). They take signed bytes only, so byte codes are lowered by 128.
#include <arm_neon.h>

#include "backends/cpu/linear_kernels.h"

namespace maga::cpu {
namespace {

#include "backends/cpu/vec_neon.inl"
// After the above:
#include "backends/cpu/vec_math.inl"

constexpr int kQuantizedTile = 8, kExactTile = 6, kExactPanels = 1;
constexpr int kByteBias = 128;

struct Nibbles {
  static constexpr int kColumns = 8, kTokensAtOnce = 4;
  int8x16_t low, high;
  static Nibbles load(const uint8_t* p) { return {low_nibbles(p), high_nibbles(p)}; }

  struct Sum {
    Ints sum;
    void begin(int32_t start) { sum = vdupq_n_s32(start); }
    void add(const Nibbles& c, const int8_t* x) {
      sum = vdotq_s32(sum, c.low, broadcast4(x));
      sum = vdotq_s32(sum, c.high, broadcast4(x + 4));
    }
    Ints total(int32_t) const { return sum; }
  };
};

struct Bytes {
  static constexpr int kColumns = 4, kTokensAtOnce = 4;
  int8x16_t codes;
  static Bytes load(const uint8_t* p) { return {vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p), vdupq_n_u8(0x80)))}; }

  struct Sum {
    Ints sum;
    void begin(int32_t start) { sum = vdupq_n_s32(start); }
    void add(const Bytes& c, const int8_t* x) { sum = vdotq_s32(sum, c.codes, broadcast4(x)); }
    Ints total(int32_t) const { return sum; }
  };
};

#include "backends/cpu/linear_run.inl"
// After the above:
#include "backends/cpu/linear_exact.inl"
#include "backends/cpu/linear_quantized.inl"

}  // namespace

const IsaKernels kNeonDotprodKernels = {{kExactTile, prepare_exact, run_exact}, {kQuantizedTile, prepare_quantized, run_quantized}};

}  // namespace maga::cpu
