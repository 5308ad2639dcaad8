// How a device chooses the token of one row of logits, and what it chose.
#pragma once

#include <cstdint>

namespace maga {

// The stages temperature, top_k, top_p, min_p and draw of decode/sampler.h, with the same meaning.
struct Draw {
  int32_t row = 0;        // of the step's logits
  float temperature = 0;  // 0: greedy, the first of the largest
  int32_t top_k = 0;      // 0: off
  float top_p = 1;
  float min_p = 0;
  uint64_t seed = 0, stream = 0, index = 0;  // of the random number: core/rng.h
};

struct Drawn {
  int32_t token = 0;   // one of the vocabulary even if the row is not finite: the next step may have read it already
  int32_t finite = 1;  // 0: the row has NaN or +infinity, or nothing but -infinity
};

}  // namespace maga
