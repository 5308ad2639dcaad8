// The only place that maps an instruction set to its row and attention kernels.
#include "backends/cpu/kernels.h"

namespace maga::cpu {

const RowKernels& row_kernels(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::avx2: return kRowsAvx2;
    case Isa::avx512:
    case Isa::avx512_vnni: return kRowsAvx512;
#elif defined(__aarch64__)
    case Isa::neon:
    case Isa::neon_dotprod: return kRowsNeon;
#endif
    default: return kRowsGeneric;
  }
}

const AttentionKernels& attention_kernels(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::avx2: return kAttentionAvx2;
    case Isa::avx512:
    case Isa::avx512_vnni: return kAttentionAvx512;
#elif defined(__aarch64__)
    case Isa::neon:
    case Isa::neon_dotprod: return kAttentionNeon;
#endif
    default: return kAttentionGeneric;
  }
}

}  // namespace maga::cpu
