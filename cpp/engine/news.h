// What the loop has to tell: events of sequences, and how many requests started and ended.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/sequence.h"

namespace maga {

struct News {
  std::vector<Event> events;                         // since the owner last cleared them
  std::atomic<int64_t> started{0};                   // requests that left the queue, by starting or by ending; read by any thread
  int64_t ended = 0;                                 // requests without unfinished sequences
  uint64_t finished = 0, cancelled = 0, failed = 0;  // of them

  // An event with the figures of one output of the sequence.
  Event& report(const Sequence& sequence, int32_t index);
  // Ends every output that the sequence stands for.
  void end(Sequence* sequence, FinishReason reason, const std::string& error = "");
  // Ends all outputs of a beam search, which none of its sequences stands for.
  void end_beams(const Sequence& sequence, FinishReason reason, const std::string& error = "");
  // Ends one of them, if it is among them; another one takes over the sequence if it must.
  void end_output(Sequence* sequence, int32_t index, FinishReason reason, const std::string& error = "");
  // Counts an output whose last event has been reported.
  void count_end(AcceptedRequest* request, FinishReason reason);
  // Returns whether it had not started before.
  bool mark_started(AcceptedRequest* request);
};

}  // namespace maga
