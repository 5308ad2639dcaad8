// Any processor.
#include "backends/cpu/row_kernels.h"

namespace maga::cpu {
namespace {
#include "backends/cpu/vec_generic.inl"
// clang-format off: the order matters
#include "backends/cpu/vec_math.inl"
#include "backends/cpu/rows.inl"
// clang-format on
}  // namespace

const RowKernels kRowsGeneric = kTable;

}  // namespace maga::cpu
