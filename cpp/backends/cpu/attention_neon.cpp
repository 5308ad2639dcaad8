// AArch64 NEON.
#include <arm_neon.h>

#include "backends/cpu/attention_kernels.h"

namespace maga::cpu {
namespace {
#include "backends/cpu/vec_neon.inl"
// clang-format off: the order matters
#include "backends/cpu/vec_math.inl"
#include "backends/cpu/attention.inl"
// clang-format on
}  // namespace

const AttentionKernels kAttentionNeon = kTable;

}  // namespace maga::cpu
