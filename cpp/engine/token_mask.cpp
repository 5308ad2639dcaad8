// Two condition variables around one list.
#include "engine/token_mask.h"

#include <utility>

namespace maga {

std::shared_ptr<TokenMask> MaskQueue::ask(uint64_t grammar, int32_t output, int32_t last_token) {
  auto mask = std::make_shared<TokenMask>();
  mask->grammar = grammar;
  mask->output = output;
  mask->last_token = last_token;
  mask->allowed.resize(words_);
  {
    std::lock_guard lock(mutex_);
    asks_.push_back(mask);
  }
  asked_.notify_one();
  return mask;
}

void MaskQueue::wait_until(std::chrono::steady_clock::time_point deadline, const std::function<bool()>& done) {
  std::unique_lock lock(mutex_);
  answered_.wait_until(lock, deadline, [&] { return closed_ || done(); });
}

void MaskQueue::close() {
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
  }
  asked_.notify_all();
  answered_.notify_all();
}

std::vector<std::shared_ptr<TokenMask>> MaskQueue::take() {
  std::unique_lock lock(mutex_);
  asked_.wait(lock, [&] { return closed_ || !asks_.empty(); });
  return closed_ ? std::vector<std::shared_ptr<TokenMask>>{} : std::exchange(asks_, {});
}

void MaskQueue::finish(TokenMask* mask, TokenMask::State state, std::string error) {
  mask->error = std::move(error);
  {
    std::lock_guard lock(mutex_);
    mask->state.store(state, std::memory_order_release);
  }
  answered_.notify_all();
}

}  // namespace maga
