// out = x · weightᵀ (+ bias, + residual, or gated): streaming kernels for few tokens, tiled ones or cuBLASLt for many.
#pragma once

#include "backends/cuda/queue.h"
#include "backends/cuda/weight.h"
#include "core/dtype.h"
#include "program/ops.h"

namespace maga::cuda {

struct LinearArgs {
  const void* weight =
      nullptr;  // (n, k) row-major, of `type`, or as `layout` says; gated: (2 n, k), the gate rows, then the up rows
  WeightLayout layout;
  const void* x = nullptr;         // (m, k) of `type`
  int64_t x_stride = 0;            // elements
  const float* x_scale = nullptr;  // as linear_quantize() leaves them: x holds e4m3 codes
  int m = 0, n = 0, k = 0;
  DType type = DType::bf16;  // f32, f16, bf16

  // The result: `out`, or `slabs` for the next kernel to add up.
  void* out = nullptr;  // (m, n)
  int64_t out_stride = 0;
  DType out_type = DType::bf16;    // `type`, or f32
  const void* bias = nullptr;      // (n), gated: (2 n), of `type`
  const void* residual = nullptr;  // (m, n) of `type`, may be `out`
  int64_t residual_stride = 0;
  bool gated = false;  // out = activation(gate) * up
  ActivationKind activation = ActivationKind::silu;
  float* slabs = nullptr;  // (slabs_of(args), m, n) partial sums, without bias and residual

  void* scratch = nullptr;  // linear_scratch_bytes()
  void* widened = nullptr;  // kWidenedBytes, for a weight that is not dense, or for tokens rounded as an e4m3 weight wants them
  bool rounded = false;     // whether all m of them are there already, as quantized_tokens() has them
};

// Room for rows of a weight that is not dense, made so for the kernels of many tokens.
constexpr int64_t kWidenedBytes = int64_t{128} << 20;

// How many slabs the kernel for this call writes when it may; 0: it has none, give `out`. Depends on m, n, k, type, layout, the
// device, and whether weight and x (with its stride) are aligned to 16 bytes: ask with the arguments of the call.
int slabs_of(const LinearArgs& args);
// Whether m tokens are rounded before a linear of e4m3 weights, so that the kernel that writes them may do so.
bool takes_rounded(int m, int k);
// Rows of all slabs together, m * slabs_of, at most, over all m up to `tokens`.
int64_t most_slab_rows(int64_t tokens, int n, int k, DType type, const WeightLayout& layout);
// Bytes of scratch that any call with these sizes needs (cuBLASLt's workspace, the two halves of a gated linear).
size_t linear_scratch_bytes(int64_t tokens, int64_t widest_gated_n, DType type);

// Opens cuBLASLt, chooses kernels for the current device. Throws Error naming what is missing.
class Linears {
 public:
  Linears();
  ~Linears();
  Linears(const Linears&) = delete;
  void run(const Queue& queue, const LinearArgs& args);

 private:
  struct State;
  State* state_;
};

}  // namespace maga::cuda
