// Stages against repetition that look at where tokens stood, not only at how often.
#pragma once

#include <cstdint>
#include <span>

#include "decode/sampler.h"

namespace maga {

// Bans every token that would complete a run of `size` tokens for the second time (transformers' no_repeat_ngram_size).
void no_repeat_ngram(MutableRow row, std::span<const int32_t> tokens, int size);

// DRY, "don't repeat yourself" (p-e-w, text-generation-webui #5677): where the last L tokens stood before, L >= allowed_length, the
// token that followed them there loses multiplier * base^(L - allowed_length), for its longest such L. The run ends before a
// breaker, and no breaker is made less likely. `range`: only the last so many tokens count; 0: all.
struct Dry {
  float multiplier = 0;
  float base = 1.75f;
  int allowed_length = 2;
  int range = 0;
  std::span<const int32_t> breakers;
};
void dry(MutableRow row, std::span<const int32_t> tokens, const Dry& settings);

}  // namespace maga
