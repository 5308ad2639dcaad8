// Mixtures of experts. The rows of a step are sorted by expert on the device; then each expert's weights meet its rows:
//   route    logits -> the experts of each row, their weights, and how many rows each expert has
//   place    a slot for each (row, expert), those of one expert next to each other; the rows, copied to their slots
//   gate_up  (slots, in) -> gated (slots, width)
//   down     -> (slots, out)
//   combine  out = residual + weights * slots
// Nothing is read back: grids depend on the number of rows alone.
#pragma once

#include "backends/cuda/moe_gemm.h"
#include "backends/cuda/rows.h"

namespace maga::cuda {

// What passes between the kernels.
struct MoeTables {
  int32_t* counts = nullptr;  // (experts) rows of each; zero between ops
  int32_t* placed = nullptr;  // (experts) of them, those that have a slot; zero between ops
  int32_t* chosen = nullptr;  // (rows, top_k) experts; -1: a padding row
  float* weights = nullptr;   // (rows, top_k)
  int32_t* slots = nullptr;   // (rows, top_k); -1: a padding row
};

struct MoeArgs {
  const Moe* op = nullptr;  // sizes, routing, gating
  int rows = 0;
  const int32_t* real_rows = nullptr;  // in device memory: rows from here on are padding; null: none are
  const float* logits = nullptr;       // (rows, experts)
  int64_t logits_stride = 0;
  Matrix x, residual, out;  // residual: null, or like out; may be `out`
  const void* gate_up = nullptr;
  const void* down = nullptr;
  WeightLayout gate_up_layout, down_layout;
  const void* gate_up_bias = nullptr;
  const void* down_bias = nullptr;
  const float* correction = nullptr;  // (experts) or null
};

class Experts {
 public:
  // For any of the ops in steps of up to `rows` rows. Counts are zeroed on the stream.
  Experts(const std::vector<const Moe*>& ops, int64_t rows, DType type, cudaStream_t stream);
  void run(const Queue& queue, const MoeArgs& args);
  int64_t bytes() const { return memory_.bytes() + counts_.bytes(); }

 private:
  DType type_;
  MoeGemm gemm_;
  DeviceMemory counts_, memory_;
};

// The kernels.
void moe_route(const Queue& queue, const MoeArgs& args, const MoeTables& tables);
void moe_place(const Queue& queue, DType type, const MoeArgs& args, const MoeTables& tables, void* sorted);
void moe_combine(const Queue& queue, DType type, const MoeArgs& args, const MoeTables& tables, const void* slots);

}  // namespace maga::cuda
