// A model for tests of the engine. It keeps what it is given in its K/V pages, and its logits are a hash of what a sequence's page
// table leads to, so a wrong table, a missed copy or a stale page changes the output; tests/engine/simulation.py knows the hash.
// Asynchronous, it does nothing before collect(): steps and copies wait in a queue, as on a device, and what the queue may ask for
// is checked.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backends/backend.h"
#include "core/threads.h"
#include "decode/sampler.h"

namespace maga {

struct FakeStep {
  int64_t tokens = 0;
  std::vector<int32_t> kv_length;        // (sequences)
  std::vector<int32_t> sequence_tokens;  // (sequences)
  int64_t draws = 0;
  bool ahead = false;  // queued while another step was in flight
};

// What a test keeps in hand once the engine has taken the model over.
struct FakeControl {
  std::mutex mutex;
  std::condition_variable changed;
  bool held = false;                       // the next step waits inside run() or collect()
  bool waiting = false;                    // a step does
  int fail_enqueue = 0, fail_collect = 0;  // how many of the next calls throw
  bool lost = false;                       // the device, says the model after that
  std::vector<FakeStep> steps;             // that ran
};

struct FakeOptions {
  int64_t vocab = 0;
  int64_t length_dependent_from = 0;  // entries depend on the length from here on, as with dynamic rope; 0: never
  int64_t long_from = 0;              // all entries of sequences from this length on are other ones, as with longrope; 0: never
  int32_t poison = -1;                // a sequence that has this token gets NaN
  int64_t max_positions = 0;
  bool asynchronous = false;
};

class FakeModel : public Executable {
 public:
  FakeModel(const FakeOptions& options, const Limits& limits, std::shared_ptr<FakeControl> control);
  const Program& program() const override { return program_; }
  const Limits& limits() const override { return limits_; }
  void run(const Step& step) override;
  std::span<const float> logits() override;
  void copy_page(int32_t from, int32_t to) override;
  bool lost() const override;
  bool asynchronous() const override { return options_.asynchronous; }
  void enqueue(const Step& step, std::span<const Draw> draws) override;
  std::span<const Drawn> collect() override;
  void write_value(ValueId, std::span<const float>) override;
  std::vector<float> read_value(ValueId, int64_t) override;
  int64_t buffer_bytes() const override { return 0; }

 private:
  // A step that waits, with memory of its own.
  struct Queued {
    std::vector<int32_t> ids, positions, sequence_start, kv_length, prompt_length, page_start, pages, logit_rows;
    std::vector<Draw> draws;
    std::vector<std::pair<int32_t, int32_t>> copies_before;
    bool ahead = false;
    Step step() const;
  };

  void check(const Step& step);
  void check_ids(const Step& step, int64_t draws_before) const;
  void check_draws(const Step& step, std::span<const Draw> draws) const;
  void wait_and_record(const Step& step, int64_t draws, bool ahead);
  void forward(const Step& step);
  void copy_now(int32_t from, int32_t to);
  Drawn draw(const Draw& draw);
  uint64_t& entry(const Step& step, int64_t sequence, int64_t index);

  FakeOptions options_;
  Program program_;
  Limits limits_;
  std::shared_ptr<FakeControl> control_;
  std::vector<uint64_t> pages_;  // (pages, page_tokens)
  std::vector<float> logits_;

  std::deque<Queued> queue_;
  std::vector<std::pair<int32_t, int32_t>> copies_;  // behind all of queue_
  std::vector<Drawn> drawn_;                         // of the step collected last
  SampleScratch scratch_;
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
