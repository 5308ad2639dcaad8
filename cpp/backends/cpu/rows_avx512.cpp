// AVX-512 F/BW/DQ/VL.
#include <immintrin.h>

#include "backends/cpu/row_kernels.h"

namespace maga::cpu {
namespace {
#include "backends/cpu/vec_avx512.inl"
// clang-format off: the order matters
#include "backends/cpu/vec_math.inl"
#include "backends/cpu/rows.inl"
// clang-format on
}  // namespace

const RowKernels kRowsAvx512 = kTable;

}  // namespace maga::cpu
