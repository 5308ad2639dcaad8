// AVX2, FMA, F16C.
#include <immintrin.h>

#include "backends/cpu/attention_kernels.h"

namespace maga::cpu {
namespace {
#include "backends/cpu/vec_avx2.inl"
// clang-format off: the order matters
#include "backends/cpu/vec_math.inl"
#include "backends/cpu/attention.inl"
// clang-format on
}  // namespace

const AttentionKernels kAttentionAvx2 = kTable;

}  // namespace maga::cpu
