// What the engine's thread does: admit, plan, build the Step, run the program, sample, commit. It knows no locks and no clients:
// requests come in through add() and cancel(), `news` go out.
//
// Phases of step(), each on the state that the one before left behind:
//   expire  -> sequences past their deadline end
//   prepare -> Scheduler::plan over the queues; preempt, admit, take pages, copy shared ones; build the Step and its draws
//   launch  -> Executable::run, or enqueue on a device that runs apart from the host
//   finish  -> collect, choose on the host what the device did not; then commit: computed pages enter the prefix cache, outputs
//              fork from their prompt, tokens are appended, sequences end
//
// On an asynchronous device the loop is one step ahead: step n + 1 is prepared and launched while step n runs, and only then is
// step n finished. A sequence whose next token step n will choose takes part in step n + 1 all the same: the device finds the token
// among the draws of step n. What the loop learns too late, and what it must not be late for:
//   - A stop token, word or string in step n, a cancellation or a failure: the sequence ends and what step n + 1 computes for it is
//     dropped. Its pages may go to others at once: whatever those write or copy is enqueued, hence run, behind step n + 1.
//     An output that ends by its length is known to, and is not scheduled again.
//   - Tokens chosen on the host (penalties, logprobs and the like) and outputs that fork: such a step is finished before the next
//     one is planned. So is every step before a plan that preempts: sequences that end in it may save others from that, and no
//     sequence loses its pages while a token of it is in flight. So is one after which a sequence is long (Program::long_from): it
//     is computed anew with the keys of long sequences, as a preempted one is.
//
// Only commit changes what a sequence has generated, and only tokens of committed steps enter the prefix cache; a failure before it
// ends the sequences of the step and leaves the rest as it was. Every page is held by the sequences that list it, or pinned,
// or cached, or free.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "backends/backend.h"
#include "engine/engine.h"
#include "engine/fault.h"
#include "engine/lap_timer.h"
#include "engine/news.h"
#include "engine/scheduler.h"
#include "engine/sequence.h"
#include "engine/step_builder.h"
#include "engine/step_in_flight.h"

namespace maga {

class Loop {
 public:
  Loop(std::shared_ptr<Backend> backend, std::unique_ptr<Executable> model, const EngineOptions& options);

  void add(std::shared_ptr<AcceptedRequest> request);
  void cancel(uint64_t request, int32_t sequence);  // sequence -1: all of them
  void cancel_all();
  bool idle() const { return nobody_left() && in_flight_ == 0; }
  void step();

  News news;
  // Everything but the counters of submission, which the doors keep.
  const EngineStats& stats();

 private:
  using Queue = std::vector<std::unique_ptr<Sequence>>;
  using Entry = StepInFlight::Entry;
  struct Choice {
    int32_t output = 0;                  // of the request
    int32_t row = 0;                     // of the logits
    const Sequence* sequence = nullptr;  // for a row that the host samples
    Sampled result;
    std::vector<float> embedding;
  };

  // loop.cpp
  void expire();
  void launch(StepInFlight* next);
  void count_least(const StepInFlight& step);
  void remove_ended();
  bool nobody_left() const { return running_.empty() && waiting_.empty(); }
  static void insert(Queue* queue, std::unique_ptr<Sequence> sequence);

  // loop_prepare.cpp
  bool prepare(StepInFlight* next);
  void begin_long_anew();
  const Plan& plan();
  PlanSequence view(const Sequence& sequence) const;
  void apply(const Plan& plan, StepInFlight* next);
  void admit(std::unique_ptr<Sequence> sequence);
  void preempt(Sequence* sequence);
  void pin(const EngineOptions& options);
  std::span<const int32_t> behind_pinned(std::span<const int32_t> tokens) const;
  bool take_pages(Sequence* sequence, int64_t tokens);
  void build(StepInFlight* next);
  void add_draws(StepInFlight* next, Entry* entry);

  // loop_finish.cpp
  void finish();
  void choose(StepInFlight* step, std::span<const Drawn> drawn);
  void sample_on_host();
  void embed();
  void commit(const StepInFlight& step);
  Choice* choice_of(const Entry& entry, int32_t output);
  void fork(Sequence* sequence, const Entry& entry);
  void append(Sequence* sequence, Choice* choice);
  void deliver(Sequence* sequence, Choice* choice);
  void fail(const StepInFlight& step, const std::string& error);

  // The figure of EngineStats that the loop's own work counts for now.
  double* host_seconds() { return asynchronous_ && in_flight_ > 0 ? &stats_.overlapped_seconds : &stats_.host_seconds; }

  std::shared_ptr<Backend> backend_;
  std::unique_ptr<Executable> model_;
  const bool asynchronous_;
  int64_t max_sequence_length_;
  const Rates rates_;
  const std::vector<double> weight_bytes_;
  Fault fault_;
  PrefixCache cache_;
  Scheduler scheduler_;
  StepBuilder builder_;
  // The pages of a prefix whose K/V entries were given, held for ever. A sequence starts with them; its Position in the prefix
  // cache begins behind the full ones, and of the last one it gets a copy if that is not full.
  std::vector<int32_t> pinned_;
  int64_t pinned_tokens_ = 0, pinned_full_ = 0;  // in them; full pages of them
  Queue running_, waiting_;                      // in the order of Sequence::runs_before
  Queue leaving_;                                // ended, but part of a step in flight; they hold no pages
  EngineStats stats_;
  LapTimer timer_;

  // The steps in flight: steps_[oldest_], and the one behind it. The next one takes the place after them.
  std::array<StepInFlight, Executable::kStepsInFlight> steps_;
  size_t oldest_ = 0, in_flight_ = 0;

  // Memory that every step reuses.
  std::vector<PlanSequence> running_view_, waiting_view_;
  std::vector<Choice> choices_;
  size_t used_choices_ = 0;
  std::vector<SampleScratch> scratch_;  // by thread
  std::vector<SequenceWork> work_;
  std::vector<OpCost> costs_;
};

// The longest sequence, prompt and output together, that model, options and K/V cache allow.
int64_t longest_sequence(const EngineOptions& options, const Executable& model);

}  // namespace maga
