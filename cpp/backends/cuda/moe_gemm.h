// The linears of experts: rows that lie sorted by expert, times the weights of their expert. Three kernels: tiles for Hopper's copy
// engine and tensor cores (moe_gemm.cuh), a plain one for all other cards, types and sizes (moe_plain.cu), and that of linear_mma.h
// for weights that are codes.
#pragma once

#include <memory>
#include <vector>

#include "backends/cuda/memory.h"
#include "backends/cuda/queue.h"
#include "backends/cuda/weight.h"
#include "core/dtype.h"
#include "program/ops.h"

namespace maga::cuda {

struct MoeGemmArgs {
  const int32_t* counts = nullptr;  // (experts) rows of each
  int experts = 0, top_k = 0;
  int tokens = 0;                // of the step; slots are tokens * top_k
  const void* x = nullptr;       // (slots, k)
  void* out = nullptr;           // (slots, n)
  const void* weight = nullptr;  // (experts, n, k); gated: (experts, 2 n, k), the gate rows and then the up rows
  WeightLayout layout;           // each expert's rows in units of their own
  const void* bias = nullptr;    // (experts * n) or null; gated: (experts * 2 n)
  int n = 0, k = 0;
  bool gated = false;
  Gating gating = {};
};

class MoeGemm {
 public:
  explicit MoeGemm(DType type);
  ~MoeGemm();
  void run(const Queue& queue, const MoeGemmArgs& args);

 private:
  bool takes(const MoeGemmArgs& args) const;
  void run_tiles(const Queue& queue, const MoeGemmArgs& args);

  DType type_;
  std::unique_ptr<class Mmas> mmas_;
  int sms_ = 0;
  bool hopper_ = false;
  std::vector<const void*> raised_;  // kernels allowed their shared memory
};

void moe_plain(const Queue& queue, DType type, int sms, const MoeGemmArgs& args);

}  // namespace maga::cuda
