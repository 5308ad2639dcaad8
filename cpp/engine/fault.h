// Faults on demand, so that tests can show what the engine and its process survive. Set by EngineOptions::fault, "kind:place:count"
// or "kind:place:count:after": from the opportunity behind `after` others on, `count` times.
//
//   throw        an exception
//   memory       the exception of an allocation that fails
//   slow         half a second passes
//   nan          forward: one number of a row of logits is none
//   no_pages     allocate: no K/V page is to be had, as if all were held
//   disk_full    the process's stdout and stderr go to a full device from then on
//   closed_pipe  they go to a pipe that nobody reads
//   clock        the wall clock jumps an hour ahead, the next time back (under tests/soak/clock.c)
//
//   admit     a request comes to the loop; a sequence leaves the queue
//   allocate  a sequence takes K/V pages
//   forward   the model runs
//   sample    tokens are chosen
//   commit    what a sequence has got is kept; an output forks
//   emit      events are handed over
//   loop      throw: between steps, where no request answers for it
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace maga {

class Fault {
 public:
  enum class Kind : uint8_t { none, throws, memory, slow, nan, no_pages, disk_full, closed_pipe, clock };
  enum class Place : uint8_t { admit, allocate, forward, sample, commit, emit, loop };

  explicit Fault(std::string_view spec);  // throws Error naming what is valid; "": none

  // Whether the fault happens now; uses up one of its opportunities.
  bool fires(Kind kind, Place place) {
    if (left_ == 0 || kind != kind_ || place != place_) return false;
    if (after_ > 0) {
      --after_;
      return false;
    }
    --left_;
    return true;
  }
  // Does what is due at `place`: throws, sleeps, spoils the process. Not what the place itself must do, nan and no_pages.
  void act(Place place) {
    if (left_ > 0 && place == place_) act_now(place);
  }

 private:
  void act_now(Place place);

  Kind kind_ = Kind::none;
  Place place_ = Place::forward;
  int64_t left_ = 0, after_ = 0;
  bool ahead_ = false;  // the clock
};

}  // namespace maga
