// The one loop (engine/loop.h): admit, plan, build the Step, run the program, sample, commit. One thread owns all of it; submit,
// cancel and poll are the only doors, and none of them waits for a step.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backends/backend.h"
#include "engine/request.h"
#include "engine/token_mask.h"
#include "program/cost.h"

namespace maga {

struct EngineOptions {
  int max_sequences = 64;           // running at once
  int token_budget = 512;           // tokens a step may carry
  int max_queue = 1024;             // requests waiting; above: BusyError
  int64_t max_sequence_length = 0;  // prefix, prompt and output together; 0: Program::max_positions
  bool prefix_cache = true;
  std::vector<int32_t> prefix;   // virtual tokens before every prompt, ids behind the vocabulary: no request sees or counts them
  bool prefix_in_pages = false;  // its K/V entries are in the model's first pages already (Executable::fill_pages) and stay there
  bool prefix_has_positions = true;  // prompts have the positions behind it; false: those from 0 on
  // With both given, the least times of steps are counted (EngineStats::least): the device's rates, the sizes of the weights.
  Rates rates = {};
  std::vector<double> weight_bytes = {};
  std::string fault;  // MAGA_FAULT, for fault tests (engine/fault.h); "": none
};

struct EngineStats {
  // Gauges. Pinned pages of a prefix count as live.
  int64_t waiting = 0, running = 0;                                           // sequences
  int64_t pages_total = 0, pages_live = 0, pages_cached = 0, pages_free = 0;  // live + cached + free == total
  // Counters since start. A request whose sequences end differently counts as failed before cancelled before finished.
  uint64_t requests = 0, finished = 0, cancelled = 0, failed = 0, preemptions = 0, evictions = 0;
  uint64_t prompt_tokens = 0, cached_tokens = 0, output_tokens = 0;
  uint64_t steps = 0;
  uint64_t corrupted = 0;  // sequences that ended because their logits were not finite
  // Where the loop's time went. model: running a step, or waiting for a device to have run it. sample: choosing tokens on the host.
  // host: the rest while the device had nothing to do. overlapped: the rest while it had; this costs nothing.
  double model_seconds = 0, sample_seconds = 0, host_seconds = 0, overlapped_seconds = 0;
  LeastSeconds least;                  // what all steps would have taken at the rates of the options
  double last_step_unix = 0;           // for the watchdog
  const char* phase = "wait";          // of the loop, now: wait (for work), admit, plan, run, collect, choose, commit, emit
  uint64_t masks = 0, masks_late = 0;  // of grammars, that a row was sampled with; of them, those that came too late for a step
  bool device_lost = false;            // every step fails from now on; the process must start anew
  bool loop_lost = false;              // the loop has ended, and all that ran with it; the same
};

class Engine {
 public:
  // Takes over the executable; starts the loop's thread.
  Engine(std::shared_ptr<Backend> backend, std::unique_ptr<Executable> model, const EngineOptions& options);
  ~Engine();  // cancels what runs
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // The bytes of each token id, for stop strings. Call before the first request that has some.
  void set_vocabulary(std::vector<std::string> token_bytes);

  // Any thread. Throws Error: invalid for a bad request, busy when the queue is full or the engine is draining.
  uint64_t submit(Request request);
  // Any thread. The request's sequences (or one of them) end with FinishReason::cancelled at the next plan; unknown ids are
  // ignored.
  void cancel(uint64_t request, int32_t sequence = -1);
  // Any thread. All events since the last call; never blocks. `event_fd` is readable while there are some.
  std::vector<Event> poll();
  int event_fd() const;
  // Where the masks of requests with a grammar are asked for; closed when the engine goes.
  std::shared_ptr<MaskQueue> masks() const;

  // Refuses new requests; true once everything that was accepted has ended, false after `timeout_seconds`.
  bool drain(double timeout_seconds);
  EngineStats stats() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace maga
