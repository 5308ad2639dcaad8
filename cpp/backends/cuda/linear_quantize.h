// Rounds the tokens of a linear of e4m3 weights.
#pragma once

#include "backends/cuda/linear.h"
#include "backends/cuda/quantized_tokens.h"

namespace maga::cuda {

// The same call with its tokens, whose columns are whole pieces of 16, rounded into args.widened, if they are not there yet.
LinearArgs linear_quantize(const Queue& queue, const LinearArgs& args);

}  // namespace maga::cuda
