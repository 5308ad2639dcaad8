// Tokens rounded to e4m3 once for a linear of e4m3 weights, a scale for every 512 columns: how they lie in memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace maga::cuda {

constexpr int kScaleColumns = 512;  // of a token that share a scale
constexpr int scale_runs(int k) { return (k + kScaleColumns - 1) / kScaleColumns; }
// Scales of m tokens in a row of them, so that rows begin at 16 bytes.
constexpr int quantized_scale_stride(int m) { return (m + 3) / 4 * 4; }
constexpr int64_t quantized_bytes(int m, int k) { return int64_t{m} * k + int64_t{scale_runs(k)} * quantized_scale_stride(m) * 4; }
// How many find room in `bytes`.
constexpr int most_quantized(int64_t bytes, int k) { return static_cast<int>(bytes / quantized_bytes(4, k)) * 4; }

struct QuantizedTokens {
  uint8_t* codes = nullptr;  // (m, k); null: not wanted
  float* scales = nullptr;   // (scale_runs(k), scale_stride)
  int scale_stride = 0;
};

// Those in `memory`, at 16 bytes; k is whole pieces of 16.
inline QuantizedTokens quantized_tokens(void* memory, int m, int k) {
  auto* const codes = static_cast<uint8_t*>(memory);
  return {codes, reinterpret_cast<float*>(codes + int64_t{m} * k), quantized_scale_stride(m)};
}

}  // namespace maga::cuda
