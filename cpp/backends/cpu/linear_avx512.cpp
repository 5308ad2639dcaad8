// Matrix kernels for AVX-512 without VNNI.
#include <immintrin.h>

#include "backends/cpu/linear_kernels.h"

namespace maga::cpu {
namespace {

#include "backends/cpu/vec_avx512.inl"
// After the above:
#include "backends/cpu/vec_math.inl"

constexpr int kQuantizedTile = 16, kExactTile = 12, kExactPanels = 2;
constexpr int kByteBias = 0;
constexpr int kByteTokens = 4;  // of byte codes, whose sums fit into the registers

// The empty statement holds the order: gcc reassociates vector additions, and then keeps all products of a unit on the stack.
inline void add_products(Ints& sum, Ints codes, Ints x) {
  sum = _mm512_add_epi16(sum, _mm512_maddubs_epi16(codes, x));
  asm("" : "+v"(sum));
}
inline Ints sum_pairs(Ints sums) { return _mm512_madd_epi16(sums, _mm512_set1_epi16(1)); }
inline Ints plus(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints times16(Ints x) { return _mm512_slli_epi32(x, 4); }
inline Ints broadcast_int(int32_t x) { return _mm512_set1_epi32(x); }

// After the above:
#include "backends/cpu/linear_maddubs.inl"
#include "backends/cpu/linear_run.inl"
// After the above:
#include "backends/cpu/linear_exact.inl"
#include "backends/cpu/linear_quantized.inl"

}  // namespace

const IsaKernels kAvx512Kernels = {{kExactTile, prepare_exact, run_exact}, {kQuantizedTile, prepare_quantized, run_quantized}};

}  // namespace maga::cpu
