// Matrix products of the CPU backend: out = x · weightᵀ, with bias, residual or gated activation in the same pass.
#pragma once

#include <cstddef>

#include "backends/cpu/isa.h"
#include "backends/cpu/weight.h"
#include "core/threads.h"
#include "program/ops.h"

namespace maga::cpu {

struct LinearCall {
  const PackedWeight* weight = nullptr;  // (rows, cols)
  const float* x = nullptr;              // (tokens, cols), rows `x_stride` apart
  int64_t x_stride = 0, tokens = 0;
  float* out = nullptr;  // (tokens, rows), or (tokens, rows / 2) if gated, rows `out_stride` apart; never overlaps x
  int64_t out_stride = 0;
  const float* bias = nullptr;      // (rows) or null
  const float* residual = nullptr;  // like out, or null; may be `out` itself
  int64_t residual_stride = 0;
  // The first half of the weight's rows are gates, the second half their up rows: out = activation(gate) * up + residual.
  bool gated = false;
  ActivationKind activation = ActivationKind::silu;
  // Affine weights only: activations rounded to int8 per block of 32 (16 where the weight's groups ask for it). Otherwise, and
  // for dense weights always, fp32 arithmetic throughout.
  bool quantize_activations = false;
};

// Enough for every call of at most `tokens` tokens and `cols` columns; 64-byte aligned.
int64_t linear_scratch_bytes(int64_t tokens, int64_t cols);

// A token's result is the same, bit for bit, whatever other tokens are in the call and however many threads run it.
void linear(ThreadPool& threads, Isa isa, std::byte* scratch, const LinearCall& call);

}  // namespace maga::cpu
