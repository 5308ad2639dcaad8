// A step checked against the limits, with what every layer needs of it worked out once.
#pragma once

#include <vector>

#include "backends/check_step.h"
#include "backends/cpu/row_kernels.h"

namespace maga::cpu {

class Batch {
 public:
  // `page_bytes` places pages in the pool.
  Batch(const Limits& limits, int64_t page_bytes, const Program& program);

  // Throws Error when the step does not fit. What `step` views must outlive its use here.
  void bind(const Step& step);

  const Step& step() const { return step_; }
  int64_t tokens() const { return step_.tokens(); }
  int64_t logit_rows() const { return static_cast<int64_t>(step_.logit_rows.size()); }
  int64_t rows(Rows kind) const { return kind == Rows::tokens ? tokens() : logit_rows(); }
  // (tokens) where each token's keys and values go, if the program keeps any
  const KvSlot* slots() const { return slots_.data(); }

 private:
  Limits limits_;
  int64_t page_bytes_;
  StepBounds bounds_;
  Step step_;
  std::vector<KvSlot> slots_;
};

}  // namespace maga::cpu
