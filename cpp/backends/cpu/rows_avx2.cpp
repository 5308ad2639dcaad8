// AVX2, FMA, F16C.
#include <immintrin.h>

#include "backends/cpu/row_kernels.h"

namespace maga::cpu {
namespace {
#include "backends/cpu/vec_avx2.inl"
// clang-format off: the order matters
#include "backends/cpu/vec_math.inl"
#include "backends/cpu/rows.inl"
// clang-format on
}  // namespace

const RowKernels kRowsAvx2 = kTable;

}  // namespace maga::cpu
