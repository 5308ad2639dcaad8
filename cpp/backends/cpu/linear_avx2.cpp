// Matrix kernels for AVX2.
#include <immintrin.h>

#include "backends/cpu/linear_kernels.h"

namespace maga::cpu {
namespace {

#include "backends/cpu/vec_avx2.inl"
// After the above:
#include "backends/cpu/vec_math.inl"

constexpr int kQuantizedTile = 8, kExactTile = 6, kExactPanels = 1;
constexpr int kByteBias = 0;
constexpr int kByteTokens = 2;  // of byte codes, whose sums fit into the registers

// The empty statement holds the order: gcc reassociates vector additions, and then keeps all products of a unit on the stack.
inline void add_products(Ints& sum, Ints codes, Ints x) {
  sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, x));
  asm("" : "+x"(sum));
}
inline Ints sum_pairs(Ints sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
inline Ints plus(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints times16(Ints x) { return _mm256_slli_epi32(x, 4); }
inline Ints broadcast_int(int32_t x) { return _mm256_set1_epi32(x); }

// After the above:
#include "backends/cpu/linear_maddubs.inl"
#include "backends/cpu/linear_run.inl"
// After the above:
#include "backends/cpu/linear_exact.inl"
#include "backends/cpu/linear_quantized.inl"

}  // namespace

const IsaKernels kAvx2Kernels = {{kExactTile, prepare_exact, run_exact}, {kQuantizedTile, prepare_quantized, run_quantized}};

}  // namespace maga::cpu
