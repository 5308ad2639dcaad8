// Outputs that follow a grammar: what their masks say, and what happens to a row whose mask is late.
#include <algorithm>
#include <chrono>

#include "engine/loop.h"

namespace maga {
namespace {

TokenMask::State state_of(const TokenMask& mask) { return mask.state.load(std::memory_order_acquire); }

// An idle loop looks for requests and cancellations this often; a step waits no longer for its masks.
constexpr auto kPatience = std::chrono::milliseconds(2);

}  // namespace

// What masks that have come say: go on, or end.
void Loop::settle_masks() {
  for (Queue* queue : {&running_, &waiting_})
    for (const auto& sequence : *queue) {
      if (sequence->ended || !sequence->allowed) continue;
      const TokenMask::State state = state_of(*sequence->allowed);
      if (state == TokenMask::State::pending) continue;
      sequence->waits_for_mask = false;
      if (state == TokenMask::State::complete) news.end(sequence.get(), FinishReason::stop);
      if (state == TokenMask::State::failed) news.end(sequence.get(), FinishReason::error, sequence->allowed->error);
    }
  remove_ended();
}

// Nothing else can run.
void Loop::wait_for_a_mask() {
  masks_->wait_until(Clock::now() + kPatience, [this] {
    return std::any_of(running_.begin(), running_.end(), [](const auto& sequence) {
      return sequence->waits_for_mask && state_of(*sequence->allowed) != TokenMask::State::pending;
    });
  });
}

// Of the rows that the host samples: masks were asked for before the model ran, so they are there, or nearly.
void Loop::await_masks() {
  const std::span<Choice> choices(choices_.data(), used_choices_);
  const auto is_pending = [](const Choice& choice) {
    return choice.sequence && choice.sequence->allowed && state_of(*choice.sequence->allowed) == TokenMask::State::pending;
  };
  const auto all_there = [&] { return std::none_of(choices.begin(), choices.end(), is_pending); };
  if (!all_there()) masks_->wait_until(Clock::now() + kPatience, all_there);
  for (Choice& choice : choices) {
    if (!choice.sequence || !choice.sequence->allowed) continue;
    const TokenMask::State state = state_of(*choice.sequence->allowed);
    choice.withheld = state != TokenMask::State::ready;
    ++stats_.masks;
    stats_.masks_late += state == TokenMask::State::pending;
  }
}

// The row was computed without a mask: its last token brings it again.
void Loop::withhold(Sequence* sequence, const Entry& entry) {
  sequence->computed = entry.end - 1;
  sequence->waits_for_mask = true;
}

}  // namespace maga
