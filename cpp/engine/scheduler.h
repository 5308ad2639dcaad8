// What the next step computes: a pure function of the queues and the sizes of the cache.
//
// Decodes come first, one token each; prompts fill the rest of the token budget, cut into chunks where they must be. Admission is
// optimistic: a sequence starts when its tokens so far fit, not its longest possible output. When pages run out, the sequence
// that is last in order gives up its pages and waits again; what it generated is kept, and computed again through the prefix cache.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace maga {

struct PlanRules {
  int64_t token_budget = 0;
  int64_t max_sequences = 0;
  int64_t page_tokens = 0;
  int64_t total_pages = 0;
  int64_t logit_rows = 0;  // at least max_sequences
};

// What a plan needs to know of a sequence.
struct PlanSequence {
  int64_t known = 0;               // tokens so far, those in flight included
  int64_t computed = 0;            // of them in pages; for one that waits: what the prefix cache has
  std::span<const int32_t> pages;  // held
  int64_t unheld = 0;              // for one that waits: pages that it would take from the cached ones
  int64_t slots = 1;               // rows of the batch it takes
  int64_t whole = 0;               // tokens, from the first on, that one step must bring together
  int64_t scored = 0;              // tokens right before the last known one that take a row of logits too, as that one does
};

struct PlanInput {
  std::span<const PlanSequence> running;  // in order: the first is the last to lose its pages
  std::span<const PlanSequence> waiting;  // in order: nobody overtakes the first
  std::span<const int32_t> references;    // holders, by page
  int64_t available = 0;                  // pages that can be had: free or cached
};

struct Plan {
  struct Run {
    int32_t sequence = 0;  // index into running or waiting
    int64_t tokens = 0;
  };
  std::vector<Run> running;
  std::vector<Run> admitted;       // the first ones of waiting; none in a plan that preempts
  std::vector<int32_t> preempted;  // indices into running, descending
  bool reject_first = false;       // the first of waiting does not fit into an empty pool

  bool empty() const { return running.empty() && admitted.empty() && preempted.empty() && !reject_first; }
};

class Scheduler {
 public:
  explicit Scheduler(const PlanRules& rules);
  const PlanRules& rules() const { return rules_; }

  // Depends on `input` only; the members are memory that it reuses. The result is valid until the next call.
  const Plan& plan(const PlanInput& input);

 private:
  void grant(int64_t sequence, int64_t wanted);
  int64_t tokens_that_fit(const PlanSequence& sequence, int64_t wanted) const;
  bool must_copy(const PlanSequence& sequence) const;
  bool preempt_after(int64_t sequence);
  void admit();
  int64_t within_rows(const PlanSequence& sequence, int64_t tokens) const;
  void take_budget(const PlanSequence& sequence, int64_t tokens);
  int64_t pages_for(int64_t tokens) const { return (tokens + rules_.page_tokens - 1) / rules_.page_tokens; }

  PlanRules rules_;
  Plan plan_;
  const PlanInput* input_ = nullptr;
  int64_t budget_ = 0;  // tokens
  int64_t rows_ = 0;    // of logits, left
  int64_t available_ = 0;
  std::vector<int64_t> granted_;  // tokens, by running sequence; kPreempted
  std::vector<int32_t> dropped_;  // holders that this plan takes away, by page
};

}  // namespace maga
