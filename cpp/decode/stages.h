// The chain of a request with RareSamplers: every stage over the whole row, in Aphrodite's order or the request's own.
//
// Default order: bans (bad_words, min_new_tokens, token_bans, token_ban_ranges, allowed_tokens), DRY, penalties and logit_bias,
// no_repeat_ngram, temperature or dynatemp, top-n-sigma, top_k and top_p, top_a, min_p, tfs, eta, epsilon, typical, quadratic, XTC,
// (temperature, if last,) mirostat, skew, draw. sampler_priority moves the stages between the bans and mirostat; bans hold
// wherever. A greedy request runs those that edit and takes the most likely token: truncation would not change it, and XTC has no
// part in it.
#pragma once

#include "decode/sampler.h"

namespace maga {

// All stages but the draw. The row may end with nothing but -infinity: bans and the like leave no token.
void run_stages(MutableRow row, const SampleInput& input, SampleScratch* scratch);
// Of them, those that edit: bans, DRY, penalties, no_repeat_ngram; for a beam search.
void edit(MutableRow row, const SampleInput& input);
// Mirostat, skew and the draw. `max`: of the row.
int32_t draw_staged(MutableRow row, float max, const SampleInput& input, SampleScratch* scratch, float* surprise);

}  // namespace maga
