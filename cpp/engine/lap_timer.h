// Splits a thread's time among figures, without gaps: each lap() adds what passed since the one before to one of them.
#pragma once

#include "engine/sequence.h"

namespace maga {

class LapTimer {
 public:
  void start() { last_ = Clock::now(); }
  void lap(double* seconds) {
    const auto now = Clock::now();
    *seconds += seconds_between(last_, now);
    last_ = now;
  }

 private:
  Clock::time_point last_ = Clock::now();
};

}  // namespace maga
