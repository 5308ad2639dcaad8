// out += bias + residual, where the multiplication could not add them.
#pragma once

#include "backends/cuda/linear.h"

namespace maga::cuda {

void linear_finish(const Queue& queue, const LinearArgs& args);

}  // namespace maga::cuda
