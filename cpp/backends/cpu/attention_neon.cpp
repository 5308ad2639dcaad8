// AArch64 NEON.
#include <arm_neon.h>

#include "backends/cpu/attention_kernels.h"

namespace maga::cpu {
namespace {

#include "backends/cpu/vec_neon.inl"
// After the above:
#include "backends/cpu/vec_math.inl"

// Rows of a tile, and registers that it may hold as sums.
constexpr int kTileRows = 6, kAccumulators = 24;

#include "backends/cpu/attention.inl"

}  // namespace

const AttentionKernels kAttentionNeon = kTable;

}  // namespace maga::cpu
