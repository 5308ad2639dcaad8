// Matrix kernels for any processor. Besides its vectors the shared kernels ask of an instruction set:
//   Nibbles, Bytes  codes of kLanes rows and kColumns columns, and Sum, their integer dot product with activations
//   k...Tile        tokens of a full tile, and kExactPanels panels that share it: as many as the registers hold
//   kByteBias       what Bytes subtracts from a code
#include "backends/cpu/linear_kernels.h"

namespace maga::cpu {
namespace {

#include "backends/cpu/vec_generic.inl"
// After the above:
#include "backends/cpu/vec_math.inl"

constexpr int kQuantizedTile = 1, kExactTile = 1, kExactPanels = 1;
constexpr int kByteBias = 0;

template <int columns>
struct Codes {
  static constexpr int kColumns = columns, kTokensAtOnce = 1;
  Ints words;
  static Codes load(const uint8_t* p) { return {load_words(p)}; }

  struct Sum {
    Ints sum;
    void begin(int32_t start) { sum = Ints{} + start; }
    void add(const Codes& c, const int8_t* x) {
      for (int i = 0; i < columns; ++i) sum += bits_of(c.words, i % 4 * 8 + i / 4 * 4, columns == 8 ? 15 : 255) * int32_t{x[i]};
    }
    Ints total(int32_t) const { return sum; }
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
