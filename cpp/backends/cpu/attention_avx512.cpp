// AVX-512 F/BW/DQ/VL.
#include <immintrin.h>

#include "backends/cpu/attention_kernels.h"

namespace maga::cpu {
namespace {

#include "backends/cpu/vec_avx512.inl"
// After the above:
#include "backends/cpu/vec_math.inl"

// Rows of a tile, and registers that it may hold as sums.
constexpr int kTileRows = 6, kAccumulators = 24;

#include "backends/cpu/attention.inl"

}  // namespace

const AttentionKernels kAttentionAvx512 = kTable;

}  // namespace maga::cpu
