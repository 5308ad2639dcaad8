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
//   - Tokens chosen on the host (penalties, logprobs, masks of grammars and the like), prompts that are scored and outputs that
//     fork: such a step is finished before the next one is planned. So is every step before a plan that preempts: sequences that
//     end in it may save others from that, and no sequence loses its pages while a token of it is in flight. So is one after which
//     a sequence is long (Program::long_from): it is computed anew with the keys of long sequences, as a preempted one is.
//
// An output with a grammar asks for the mask of its next token when it gets the last one; the mask is computed beside the loop
// while the model runs. Where it is not there when the step samples, nothing is chosen for this output: its last token is computed
// once more when the mask has come, and the others do not wait.
//
// The beams of a request are sequences that wait for each other: one that has its continuations brings no token until all have
// theirs, and then the best continuations take their places, sharing the pages of those they continue (loop_beams.cpp).
//
// Only commit changes what a sequence has generated, and only tokens of committed steps enter the prefix cache; a failure before it
// ends the sequences of the step and leaves the rest as it was. Every page is held by the sequences that list it, or pinned,
// or cached, or free.
#pragma once

#include <array>
#include <atomic>
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
#include "engine/token_mask.h"

namespace maga {

class Loop {
 public:
  Loop(std::shared_ptr<Backend> backend, std::unique_ptr<Executable> model, const EngineOptions& options);

  void add(std::shared_ptr<AcceptedRequest> request);
  void cancel(uint64_t request, int32_t sequence);  // sequence -1: all of them
  void cancel_all();
  void abandon(const std::string& error);              // ends everything, after a failure that no step answers for
  void act(Fault::Place place) { fault_.act(place); }  // of the doors: emit and loop
  bool idle() const { return nobody_left() && in_flight_ == 0; }
  void step();

  News news;
  std::atomic<const char*> phase{"wait"};  // EngineStats::phase, to be read by any thread
  // Everything but the counters of submission, which the doors keep.
  const EngineStats& stats();
  const std::shared_ptr<MaskQueue>& masks() const { return masks_; }

 private:
  using Queue = std::vector<std::unique_ptr<Sequence>>;
  using Entry = StepInFlight::Entry;
  struct Choice {
    int32_t output = 0;                  // of the request
    int32_t row = 0;                     // of the logits
    const Sequence* sequence = nullptr;  // for a row that the host samples
    bool withheld = false;               // its mask is late, or lets nothing follow: no token was chosen
    Sampled result;
    std::vector<float> embedding;
    std::vector<Candidate> continuations;
  };
  // The log probability of a token of a prompt.
  struct Score {
    int32_t row = 0;    // of the logits
    int32_t token = 0;  // that comes next
    int32_t top = 0;
    bool finite = false;
    TokenLogprobs result;
  };

  // loop.cpp
  void expire();
  void launch(StepInFlight* next);
  void count_least(const StepInFlight& step);
  void remove_ended();
  bool nobody_left() const { return running_.empty() && waiting_.empty() && parked_.empty(); }
  std::array<Queue*, 3> queues() { return {&running_, &waiting_, &parked_}; }
  static void insert(Queue* queue, std::unique_ptr<Sequence> sequence);

  // loop_prepare.cpp
  bool prepare(StepInFlight* next);
  void begin_long_anew();
  const Plan& plan();
  PlanSequence view(const Sequence& sequence) const;
  void apply(const Plan& plan, StepInFlight* next);
  void admit(Sequence* sequence);
  void preempt(Sequence* sequence);
  bool park_a_beam();
  void pin(const EngineOptions& options);
  std::span<const int32_t> behind_pinned(std::span<const int32_t> tokens) const;
  bool take_pages(Sequence* sequence, int64_t tokens);
  void build(StepInFlight* next);
  void add_draws(StepInFlight* next, Entry* entry);

  // loop_beams.cpp
  void advance(AcceptedRequest* request);
  Queue take_beams(const AcceptedRequest& request);
  void tell_beams(const Sequence& sequence);

  // loop_masks.cpp
  void settle_masks();
  void wait_for_a_mask();
  void await_masks();
  void withhold(Sequence* sequence, const Entry& entry);

  // loop_finish.cpp
  void finish();
  void choose(StepInFlight* step, std::span<const Drawn> drawn);
  void read_rows(const StepInFlight& step);
  void sample_on_host();
  void score(StepInFlight* step);
  void embed();
  void commit(StepInFlight* step);
  Choice* choice_of(const Entry& entry, int32_t output);
  void fork(StepInFlight* step, const Entry& entry);
  void poison(const StepInFlight& step);
  bool tell_scores(Sequence* sequence, const Entry& entry);
  void append(Sequence* sequence, Choice* choice);
  void add_rows(const SamplingParams& params, int32_t row, Event* event) const;
  void deliver(Sequence* sequence, Choice* choice);
  void fail(const StepInFlight& step, const std::string& error);

  // The figure of EngineStats that the loop's own work counts for now.
  double* host_seconds() { return asynchronous_ && in_flight_ > 0 ? &stats_.overlapped_seconds : &stats_.host_seconds; }

  std::shared_ptr<Backend> backend_;
  std::unique_ptr<Executable> model_;
  const bool asynchronous_;
  int64_t max_sequence_length_;
  const View hidden_state_;
  const Rates rates_;
  const std::vector<double> weight_bytes_;
  Fault fault_;
  PrefixCache cache_;
  Scheduler scheduler_;
  StepBuilder builder_;
  std::shared_ptr<MaskQueue> masks_;
  // The pages of a prefix whose K/V entries were given, held for ever. A sequence starts with them; its Position in the prefix
  // cache begins behind the full ones, and of the last one it gets a copy if that is not full.
  std::vector<int32_t> pinned_;
  int64_t pinned_tokens_ = 0, pinned_full_ = 0;  // in them; full pages of them
  Queue running_, waiting_;                      // in the order of Sequence::runs_before
  Queue leaving_;                                // ended, but part of a step in flight; they hold no pages
  Queue parked_;                                 // beams that have chosen and lost their pages while the others choose
  Queue replaced_;                               // beams that gave way to others in the step that is being finished
  EngineStats stats_;
  LapTimer timer_;

  // The steps in flight: steps_[oldest_], and the one behind it. The next one takes the place after them.
  std::array<StepInFlight, Executable::kStepsInFlight> steps_;
  size_t oldest_ = 0, in_flight_ = 0;

  // Memory that every step reuses.
  std::vector<PlanSequence> running_view_, waiting_view_;
  std::vector<Choice> choices_;
  size_t used_choices_ = 0;
  std::vector<Score> scores_;
  // Of the step that is being finished, where the host needs them.
  std::span<const float> logits_;       // (rows, vocab)
  std::vector<float> poisoned_;         // in their place where a fault is to be seen
  std::vector<float> hidden_;           // (rows, width of that value)
  std::vector<SampleScratch> scratch_;  // by thread
  std::vector<SequenceWork> work_;
  std::vector<OpCost> costs_;
};

// The longest sequence, prompt and output together, that model, options and K/V cache allow.
int64_t longest_sequence(const EngineOptions& options, const Executable& model);
// What the linear that writes the logits reads: the last hidden state, a row per logits row. It can be read after a run, as nothing
// is written behind it. Empty where there is no such linear.
View hidden_state(const Program& program);

}  // namespace maga
