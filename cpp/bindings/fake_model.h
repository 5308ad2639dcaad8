// A model for tests of the engine. It keeps what it is given in its K/V pages, and its logits are a hash of what a sequence's page
// table leads to, so a wrong table, a missed copy or a stale page changes the output; tests/engine/simulation.py knows the hash.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backends/backend.h"
#include "core/threads.h"

namespace maga {

struct FakeStep {
  int64_t tokens = 0;
  std::vector<int32_t> kv_length;        // (sequences)
  std::vector<int32_t> sequence_tokens;  // (sequences)
};

// What a test keeps in hand once the engine has taken the model over.
struct FakeControl {
  std::mutex mutex;
  std::condition_variable changed;
  bool held = false;     // the next step waits inside run()
  bool waiting = false;  // a step does
  std::vector<FakeStep> steps;
};

struct FakeOptions {
  int64_t vocab = 0;
  int64_t length_dependent_from = 0;  // entries depend on the length from here on, as with dynamic rope; 0: never
  int32_t poison = -1;                // a sequence that has this token gets NaN
  int64_t max_positions = 0;
};

class FakeModel : public Executable {
 public:
  FakeModel(const FakeOptions& options, const Limits& limits, std::shared_ptr<FakeControl> control);
  const Program& program() const override { return program_; }
  const Limits& limits() const override { return limits_; }
  void run(const Step& step) override;
  std::span<const float> logits() override { return logits_; }
  void copy_page(int32_t from, int32_t to) override;
  void write_value(ValueId, std::span<const float>) override;
  std::vector<float> read_value(ValueId, int64_t) override;
  int64_t buffer_bytes() const override { return 0; }

 private:
  void check(const Step& step);
  uint64_t& entry(const Step& step, int64_t sequence, int64_t index);

  FakeOptions options_;
  Program program_;
  Limits limits_;
  std::shared_ptr<FakeControl> control_;
  std::vector<uint64_t> pages_;  // (pages, page_tokens)
  std::vector<float> logits_;
};

// Only its threads are used: FakeModel needs no weights.
class FakeBackend : public Backend {
 public:
  explicit FakeBackend(int threads) : threads_(threads) {}
  std::string describe() const override { return "fake"; }
  FusedOps fused_ops() const override { return {}; }
  ThreadPool& threads() override { return threads_; }
  std::shared_ptr<const Weight> pack(const WeightSpec& spec, const Canonical&) override;
  std::unique_ptr<Executable> load(const Program&, std::vector<std::shared_ptr<const Weight>>, const Limits&) override;

 private:
  ThreadPool threads_;
};

}  // namespace maga
