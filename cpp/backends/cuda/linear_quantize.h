// Tokens rounded to e4m3 by 512 columns, for linears of e4m3 weights and many tokens.
#pragma once

#include <cstddef>

#include "backends/cuda/linear.h"

namespace maga::cuda {

// Columns of a token that share a scale, and bytes of what linear_quantize makes of a token.
constexpr int kTileScaleColumns = 512;
constexpr int64_t quantized_token_bytes(int k) { return k + int64_t{(k + kTileScaleColumns - 1) / kTileScaleColumns} * 4; }

// The same call with its tokens, whose columns are whole pieces of 16, rounded into `to`.
LinearArgs linear_quantize(const Queue& queue, const LinearArgs& args, void* to);

}  // namespace maga::cuda
