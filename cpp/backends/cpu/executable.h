// A program bound to CPU memory: one run() is a walk over the op list.
#pragma once

#include "backends/cpu/attention.h"
#include "backends/cpu/backend.h"
#include "backends/cpu/batch.h"
#include "backends/cpu/kernels.h"
#include "backends/cpu/mapping.h"
#include "backends/cpu/moe.h"
#include "backends/cpu/pages.h"
#include "backends/cpu/rope.h"
#include "backends/cpu/vector_weight.h"
#include "backends/cpu/weight.h"
#include "program/buffers.h"

namespace maga::cpu {

class CpuExecutable : public Executable {
 public:
  // `program` is fused already, and its parts are valid.
  CpuExecutable(std::shared_ptr<Device> device, Program program, std::vector<std::shared_ptr<const Weight>> weights,
                const Limits& limits);

  const Program& program() const override { return program_; }
  const Limits& limits() const override { return limits_; }
  void run(const Step& step) override;
  std::span<const float> logits() override;
  void copy_page(int32_t from, int32_t to) override { pages_.copy(from, to); }
  void write_value(ValueId value, std::span<const float> rows) override;
  std::vector<float> read_value(ValueId value, int64_t rows) override;
  int64_t buffer_bytes() const override;
  std::vector<double> op_seconds() const override { return op_seconds_; }

 private:
  void check_weights() const;
  void place_values();
  void plan_attention();
  void allocate_scratch();

  void fill(int32_t layer, int64_t tokens, const float* keys, const float* values) override;

  void run(const Embed& op);
  void run(const AddPositions& op);
  void run(const LogScale& op);
  void run(const Bound& op);
  void run(const Norm& op);
  void run(const Linear& op);
  void run(const HeadLinear& op);
  void run(const Rope& op);
  void run(const Attention& op);
  void run(const Activation& op);
  void run(const Add& op);
  void run(const Select& op);
  void run(const Pool& op);
  void run(const Moe& op);
  void run(const GatedLinear& op);
  void run(const PrepareQkv& op);

  // body(first row, rows, thread) over the rows of `view`, on several threads when rows * floats_per_row is worth it.
  template <typename Body>
  void over_rows(const View& view, int64_t floats_per_row, Body&& body);

  float* at(const View& view) { return values_[view.value] + view.offset; }
  int64_t stride(const View& view) const { return program_.values[view.value].width; }
  int64_t rows(const View& view) const { return batch_.rows(program_.values[view.value].rows); }
  int64_t capacity(ValueId value) const;
  const PackedWeight& matrix(WeightId weight) const;
  const float* vector(WeightId weight) const;  // null for kNone
  float* scratch(int thread) { return reinterpret_cast<float*>(scratch_->data()) + thread * thread_floats_; }
  int64_t own_weights(const Norm& op) const;  // as NormRows::own
  AttentionForm form_of(const Attention& op) const;

  std::shared_ptr<Device> device_;
  const RowKernels& kernels_;
  Program program_;
  std::vector<std::shared_ptr<const Weight>> weights_;
  Limits limits_;
  KvPages pages_;
  Batch batch_;
  std::vector<RopeTurns> turns_;
  std::unique_ptr<Mapping> arena_, scratch_, partials_;
  std::vector<float*> values_;  // (values) rows `width` floats apart
  std::vector<AttentionPlan> plans_;
  Experts experts_;
  int64_t thread_floats_ = 0;  // scratch of one thread in the row and attention kernels; linears use the same memory
  std::vector<double> op_seconds_;
};

}  // namespace maga::cpu
