// Tokens rounded to e4m3 by 512 columns, once for a linear of e4m3 weights.
#pragma once

#include <cstddef>

#include "backends/cuda/linear.h"

namespace maga::cuda {

constexpr int kScaleColumns = 512;  // of a token that share a scale
constexpr int scale_runs(int k) { return (k + kScaleColumns - 1) / kScaleColumns; }
// Scales of m tokens in a row of them, so that rows begin at 16 bytes.
constexpr int quantized_scale_stride(int m) { return (m + 3) / 4 * 4; }
constexpr int64_t quantized_bytes(int m, int k) { return int64_t{m} * k + int64_t{scale_runs(k)} * quantized_scale_stride(m) * 4; }
// How many find room in `bytes`.
constexpr int most_quantized(int64_t bytes, int k) { return static_cast<int>(bytes / quantized_bytes(4, k)) * 4; }

// The same call with its tokens, whose columns are whole pieces of 16, rounded into `to`: (m, k) codes, then (scale_runs(k),
// quantized_scale_stride(m)) scales. `whole`: a scale for each token, m of them.
LinearArgs linear_quantize(const Queue& queue, const LinearArgs& args, void* to, bool whole = false);

}  // namespace maga::cuda
