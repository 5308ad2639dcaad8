// Matrix kernels for any processor. The vectors below are what the shared kernels ask of an instruction set:
//   F, I            kLanes floats, kLanes 32-bit integers
//   Nibbles, Bytes  codes of kLanes rows and kColumns columns, and Sum, their integer dot product with activations
//   k...Tile        tokens of a full tile, and kExactPanels panels that share it: as many as the registers hold
//   kByteBias       what Bytes subtracts from a code
#include "backends/cpu/linear_kernels.h"
#include "core/dtype.h"

namespace maga::cpu {
namespace {

constexpr int kLanes = 4;
constexpr int kQuantizedTile = 1, kExactTile = 1, kExactPanels = 1;
constexpr int kByteBias = 0;

using F = float __attribute__((vector_size(16)));
using I = int32_t __attribute__((vector_size(16)));

inline F set1(float x) { return F{} + x; }
template <typename T, typename Widen>
inline F load_widened(const T* p, Widen widen) {
  F x;
  for (int i = 0; i < kLanes; ++i) x[i] = widen(p[i]);
  return x;
}
inline F load(const float* p) {
  F x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
inline F load_half(const uint16_t* p) { return load_widened(p, f16_to_float); }
inline F load_bfloat(const uint16_t* p) { return load_widened(p, bf16_to_float); }
inline void store(float* p, F x) { __builtin_memcpy(p, &x, sizeof x); }
inline F add(F a, F b) { return a + b; }
inline F subtract(F a, F b) { return a - b; }
inline F mul(F a, F b) { return a * b; }
inline F divide(F a, F b) { return a / b; }
inline F fma(F a, F b, F c) { return a * b + c; }
inline F negate(F x) { return -x; }
inline F absolute(F x) { return reinterpret_cast<F>(reinterpret_cast<I>(x) & 0x7fffffff); }
inline F clamp(F x, float low, float high) {
  x = x < set1(low) ? set1(low) : x;
  return x > set1(high) ? set1(high) : x;
}
inline F where_negative(F x, F yes, F no) { return x < set1(0) ? yes : no; }
inline F to_float(I x) { return __builtin_convertvector(x, F); }
inline I round_to_int(F x) { return reinterpret_cast<I>(x + set1(12582912.0f)) - 0x4B400000; }
inline F power_of_two(I n) { return reinterpret_cast<F>((n + 127) << 23); }

inline I load_words(const void* p) {
  I words;
  __builtin_memcpy(&words, p, sizeof words);
  return words;
}
inline I bits_of(I words, int shift, int mask) { return (words >> shift) & mask; }

template <int columns>
struct Codes {
  static constexpr int kColumns = columns, kTokensAtOnce = 1;
  I words;
  static Codes load(const uint8_t* p) { return {load_words(p)}; }

  struct Sum {
    I sum;
    void begin(int32_t start) { sum = I{} + start; }
    void add(const Codes& c, const int8_t* x) {
      for (int i = 0; i < columns; ++i) sum += bits_of(c.words, i % 4 * 8 + i / 4 * 4, columns == 8 ? 15 : 255) * int32_t{x[i]};
    }
    I total(int32_t) const { return sum; }
  };
};
using Nibbles = Codes<8>;
using Bytes = Codes<4>;

#include "backends/cpu/linear_run.inl"
// After the above:
#include "backends/cpu/linear_exact.inl"
#include "backends/cpu/linear_quantized.inl"

}  // namespace

const IsaKernels kGenericKernels = {{kExactTile, prepare_exact, run_exact}, {kQuantizedTile, prepare_quantized, run_quantized}};

}  // namespace maga::cpu
