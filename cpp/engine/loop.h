// What the engine's thread does: admit, plan, build the Step, run the program, sample, commit. It knows no locks and no clients:
// requests come in through add() and cancel(), `news` go out.
//
// Phases of step(), each on the state that the one before left behind:
//   expire  -> sequences past their deadline end
//   plan    -> Scheduler::plan over the queues; preempt, admit, take pages, copy shared ones
//   forward -> Executable::run
//   sample  -> every row with logits, in parallel
//   commit  -> computed pages enter the prefix cache, outputs fork from their prompt, tokens are appended, sequences end
// Only commit changes what a sequence has generated; a failure before it ends the sequences of the step and leaves the rest as it
// was. Every page is held by the sequences that list it, or cached, or free.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backends/backend.h"
#include "engine/engine.h"
#include "engine/fault.h"
#include "engine/news.h"
#include "engine/scheduler.h"
#include "engine/sequence.h"
#include "engine/step_builder.h"

namespace maga {

class Loop {
 public:
  Loop(std::shared_ptr<Backend> backend, std::unique_ptr<Executable> model, const EngineOptions& options);

  void add(std::shared_ptr<AcceptedRequest> request);
  void cancel(uint64_t request, int32_t sequence);  // sequence -1: all of them
  void cancel_all();
  bool idle() const { return running_.empty() && waiting_.empty(); }
  void step();

  News news;
  // Everything but the counters of submission, which the doors keep.
  const EngineStats& stats();

 private:
  using Queue = std::vector<std::unique_ptr<Sequence>>;  // in the order of Sequence::runs_before
  struct Scheduled {
    Sequence* sequence = nullptr;
    int64_t tokens = 0;
    int32_t row = -1;        // of the logits
    int32_t first_draw = 0;  // index into draws_, one for each output the sequence stands for
  };
  struct Draw {
    SampleInput input;
    Sampled result;
  };

  void expire();
  const Plan& plan();
  void apply(const Plan& plan);
  bool take_pages(Sequence* sequence, int64_t tokens);
  void forward();
  void sample();
  void commit();

  void admit(std::unique_ptr<Sequence> sequence);
  void preempt(Sequence* sequence);
  void fork(Sequence* sequence, const Scheduled& scheduled);
  void append(Sequence* sequence, Draw* draw);
  void fail_step(const std::string& error);
  void remove_ended();
  static void insert(Queue* queue, std::unique_ptr<Sequence> sequence);

  std::shared_ptr<Backend> backend_;
  std::unique_ptr<Executable> model_;
  int64_t max_sequence_length_;
  Fault fault_;
  PrefixCache cache_;
  Scheduler scheduler_;
  StepBuilder builder_;
  Queue running_, waiting_;
  EngineStats stats_;

  // Memory that every step reuses.
  std::vector<PlanSequence> running_view_, waiting_view_;
  std::vector<Scheduled> scheduled_;
  std::vector<Draw> draws_;
  size_t used_draws_ = 0;
  std::vector<SampleScratch> scratch_;  // by thread
  std::vector<float> nan_row_;          // for the fault nan:forward
};

// The longest sequence, prompt and output together, that model, options and K/V cache allow.
int64_t longest_sequence(const EngineOptions& options, const Executable& model);

}  // namespace maga
