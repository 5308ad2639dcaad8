// A step from its plan to its commit: which sequences take part, and what they draw on the device.
#pragma once

#include <vector>

#include "backends/draw.h"
#include "engine/sequence.h"

namespace maga {

struct StepInFlight {
  struct Entry {
    Sequence* sequence = nullptr;  // lives at least until the step is committed, even if it ends before
    int64_t tokens = 0;            // that it brings
    int64_t end = 0;               // its K/V entries after this step
    int32_t row = -1;              // of the logits, of its last token
    int32_t first_scored = 0;      // row of the logits, of those before it that tell log probabilities of the prompt
    int32_t scored = 0;            // how many
    int32_t first_score = 0;       // of Loop::scores_, as many
    int32_t first_draw = -1;       // of the device, which draws once for each output of the sequence; -1: the host chooses
    int32_t draws = 0;
    int32_t first_choice = 0;  // of Loop::choices_, what was chosen on device or host
    int32_t choices = 0;
  };

  std::vector<Entry> entries;
  std::vector<Draw> draws;
  std::vector<Sequence*> forks;  // that its commit made: they share its fate
  // To be committed before the next step is planned: tokens are chosen on the host, or outputs fork.
  bool alone = false;

  void clear() {
    entries.clear();
    draws.clear();
    forks.clear();
    alone = false;
  }
};

}  // namespace maga
