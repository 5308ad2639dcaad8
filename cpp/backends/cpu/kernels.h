// The kernel tables of an instruction set.
#pragma once

#include "backends/cpu/attention_kernels.h"
#include "backends/cpu/isa.h"
#include "backends/cpu/row_kernels.h"

namespace maga::cpu {

const RowKernels& row_kernels(Isa isa);
const AttentionKernels& attention_kernels(Isa isa);

}  // namespace maga::cpu
