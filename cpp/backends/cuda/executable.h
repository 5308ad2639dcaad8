// A program bound to one card. A step is copied to the card at once; then every op becomes one or two kernels on one stream.
//
// Steps in which each sequence brings one token run as captured graphs, one a batch bucket: all that changes between steps
// (ids, lengths, page tables, sampling parameters) is read from device memory. Other steps launch their kernels one by one.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "backends/check_step.h"
#include "backends/cuda/attention.h"
#include "backends/cuda/backend.h"
#include "backends/cuda/memory.h"
#include "backends/cuda/moe.h"
#include "backends/cuda/rows.h"
#include "backends/cuda/staging.h"
#include "backends/cuda/stream.h"
#include "backends/cuda/weight.h"

namespace maga::cuda {

class CudaExecutable : public Executable {
 public:
  CudaExecutable(std::shared_ptr<Device> device, Program program, std::vector<std::shared_ptr<const Weight>> weights,
                 const Limits& limits);
  ~CudaExecutable() override;

  const Program& program() const override { return program_; }
  const Limits& limits() const override { return limits_; }
  void run(const Step& step) override;
  std::span<const float> logits() override;
  void copy_page(int32_t from, int32_t to) override;
  bool lost() const override;
  bool asynchronous() const override { return true; }
  void enqueue(const Step& step, std::span<const Draw> draws) override;
  std::span<const Drawn> collect() override;
  void write_value(ValueId value, std::span<const float> rows) override;
  std::vector<float> read_value(ValueId value, int64_t rows) override;
  int64_t buffer_bytes() const override;

 private:
  // A step that was enqueued and not yet collected.
  struct Slot {
    PinnedMemory drawn;  // (logit_rows) Drawn
    Event done;
    int64_t draws = 0;
    int64_t rows = 0;  // of logits
  };
  // Where the linear before left its result, if the next op is to add it up.
  struct Pending {
    Slabs slabs;
    Matrix residual, out;
    int rows = 0, width = 0;
  };
  // The keys and values of a layer as PrepareQkv left them outside the pages.
  struct OwnKeys {
    int32_t layer = kNone;
    Matrix k, v;
  };

  void fill(int32_t layer, int64_t tokens, const float* keys, const float* values) override;
  void check_weights();
  void make_dense(WeightId id);
  void copy_in(const DeviceMemory& to, std::span<const float> from);
  void find_routers();
  void plan_lowering();
  void place_values();
  void allocate_scratch();
  void make_attention(const Limits& limits);
  void make_pages(int64_t pages);
  void warm_up(int64_t budget);
  int64_t pages_that_fit() const;
  int64_t most_page_ids() const;

  void forward(const DeviceStep& step, const Step* host);
  void capture_graphs();
  StepShape shape_of(const Step& step, int64_t draws) const;
  void launch(const StepShape& shape, const Step& step);

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
  void add_up_pending();

  const DeviceWeight& weight(WeightId id) const { return static_cast<const DeviceWeight&>(*weights_[id]); }
  const void* data(WeightId id) const { return id == kNone ? nullptr : weight(id).data(); }
  DType type_of(ValueId value) const { return wide_[value] ? DType::f32 : device_->compute; }
  int64_t capacity(ValueId value) const;
  Matrix matrix(const View& view) const;
  int rows(const View& view) const { return program_.values[view.value].rows == Rows::tokens ? step_.tokens : step_.rows; }
  KvLayer kv_layer(int32_t layer) const;
  AttentionPlan& plan_of(const Attention& op);
  int own_weights(const Norm& op) const;  // as NormArgs::own
  LinearArgs linear_args(const View& in, const View& out, WeightId weight, WeightId bias) const;

  std::shared_ptr<Device> device_;
  Program program_;
  std::vector<std::shared_ptr<const Weight>> weights_;
  Limits limits_;
  StepBounds bounds_;
  std::vector<bool> wide_;     // (values) logits of the vocabulary and of routers, which stay fp32
  std::vector<bool> adds_up_;  // (ops) whether the op can add up the slabs of the linear before it
  std::vector<bool> rounds_;   // (ops) whether it is a norm of what the next one, a linear of e4m3 weights, takes

  Stream stream_;
  Queue queue_;
  DeviceMemory arena_, slabs_, scratch_, widened_, sample_scratch_, pool_;
  std::vector<int64_t> offsets_;         // (values) in the arena
  std::vector<DeviceMemory> inv_freqs_;  // (rope tables)
  std::vector<DeviceMemory> turns_;
  std::vector<DeviceMemory> alibi_slopes_, corrections_;
  std::vector<std::unique_ptr<AttentionPlan>> plans_;
  std::vector<const AttentionPlan*> layer_plans_;  // (cache layers) of an attention over the layer
  std::vector<int64_t> layer_offset_;              // (cache layers) bytes from the start of a page
  int64_t page_bytes_ = 0;
  std::optional<Experts> experts_;
  std::optional<Staging> staging_;
  DeviceMemory chosen_, drawn_;  // (logit_rows)

  Slot slots_[kStepsInFlight];
  int64_t enqueued_ = 0, collected_ = 0;
  int64_t logit_rows_ = 0;  // of the last step run or collected
  PinnedMemory logits_;
  std::map<int, Graph> graphs_;  // by batch bucket

  // While ops are being launched.
  DeviceStep step_;
  std::optional<Pending> pending_;
  OwnKeys own_keys_;
  bool after_prepare_ = false;                  // the op in front is PrepareQkv
  bool rounds_next_ = false, rounded_ = false;  // whether the norm may round, and has rounded, the tokens of the next linear
};

}  // namespace maga::cuda
