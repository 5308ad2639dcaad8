// Every size and index of a step is checked here, once, so that kernels need not.
#pragma once

#include "backends/backend.h"

namespace maga {

// Throws Error when the step does not fit. `keeps_kv`: whether the program has K/V pages. `earlier_draws`: draws of the step
// enqueued before, which ids may refer to.
void check_step(const Step& step, const Limits& limits, bool keeps_kv, int64_t vocab, int64_t earlier_draws = 0);

}  // namespace maga
