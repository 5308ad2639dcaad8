// Which tokens may come next in an output, as a grammar says it. Grammars live outside of the engine, on a thread of their own: the
// loop asks for a mask as soon as it knows the token before, runs the model meanwhile, and needs the mask only when it samples. A
// mask that is late delays its own output and nobody else's.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace maga {

struct TokenMask {
  enum class State : uint8_t {
    pending,
    ready,
    complete,  // nothing may follow: the output ends here
    failed,    // `error` says why
  };

  // Of whom it is: written before anybody else sees it.
  uint64_t grammar = 0;     // Request::grammar
  int32_t output = 0;       // of the request
  int32_t last_token = -1;  // of that output; -1: none yet, and this mask is for all outputs of the request

  // Written by the grammars' thread while the state is pending.
  std::vector<uint32_t> allowed;  // bit t % 32 of word t / 32: token t may come next
  std::string error;

  std::atomic<State> state{State::pending};
};

// What crosses between the loop and the grammars' thread. A lock is held only to push and to swap.
class MaskQueue {
 public:
  explicit MaskQueue(int64_t vocab) : words_((vocab + 31) / 32) {}

  // Of the loop.
  std::shared_ptr<TokenMask> ask(uint64_t grammar, int32_t output, int32_t last_token);
  // Until masks have changed so that `done` holds, or the deadline has passed.
  void wait_until(std::chrono::steady_clock::time_point deadline, const std::function<bool()>& done);
  void close();

  // Of the grammars' thread: what has been asked for, at least one; none once the queue is closed.
  std::vector<std::shared_ptr<TokenMask>> take();
  void finish(TokenMask* mask, TokenMask::State state, std::string error = "");

 private:
  const size_t words_;
  std::mutex mutex_;
  std::condition_variable asked_, answered_;
  std::vector<std::shared_ptr<TokenMask>> asks_;
  bool closed_ = false;
};

}  // namespace maga
