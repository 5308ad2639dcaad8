// Chooses tokens on the device, without a sort: the stages temperature, top_k, top_p, min_p and draw of decode/sampler.h.
#pragma once

#include "backends/cuda/queue.h"
#include "backends/draw.h"

namespace maga::cuda {

struct SampleArgs {
  const float* logits = nullptr;  // (rows, vocab)
  int vocab = 0;
  const Draw* draws = nullptr;  // device, (count); a draw whose row is -1 is padding
  int count = 0;
  int32_t* chosen = nullptr;  // device, (count): tokens, for the next step
  Drawn* result = nullptr;    // (count) in memory that the host reads
  void* scratch = nullptr;    // sample_scratch_bytes(count)
};

size_t sample_scratch_bytes(int count);
void sample(const Queue&, const SampleArgs&);

}  // namespace maga::cuda
