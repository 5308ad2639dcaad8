// AVX2, FMA, F16C.
#include <immintrin.h>

#include "backends/cpu/attention_kernels.h"

namespace maga::cpu {
namespace {

#include "backends/cpu/vec_avx2.inl"
// After the above:
#include "backends/cpu/vec_math.inl"

// Rows of a tile, and registers that it may hold as sums.
constexpr int kTileRows = 6, kAccumulators = 12;

#include "backends/cpu/attention.inl"

}  // namespace

const AttentionKernels kAttentionAvx2 = kTable;

}  // namespace maga::cpu
