// What the check and the timing of the CUDA linears of e4m3 weights share: random codes, one scale a row behind them.
#pragma once

#include "cuda_linear.h"

namespace maga::bench {

// codes (rows, columns), scales (rows): codes deviate by 0.2 of the largest, values by about `deviation`.
void fill_codes(cudaStream_t stream, void* codes, int64_t rows, int64_t columns, float deviation, uint32_t seed);
constexpr int64_t code_bytes(int64_t rows, int64_t columns) { return rows * (columns + 4); }

// Prints the number of cases and failures; returns the failures. `small`: few and small cases, for compute-sanitizer.
int check_fp8(cudaStream_t stream, bool small, const std::vector<DType>& types);
// Prints relative errors of whole results, against tokens that are not rounded.
void print_fp8_errors(cudaStream_t stream);

}  // namespace maga::bench
