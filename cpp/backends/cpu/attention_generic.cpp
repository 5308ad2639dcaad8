// Any processor.
#include "backends/cpu/attention_kernels.h"

namespace maga::cpu {
namespace {
#include "backends/cpu/vec_generic.inl"
// clang-format off: the order matters
#include "backends/cpu/vec_math.inl"
#include "backends/cpu/attention.inl"
// clang-format on
}  // namespace

const AttentionKernels kAttentionGeneric = kTable;

}  // namespace maga::cpu
