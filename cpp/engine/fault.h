// Faults on demand, so that tests can show what the engine survives. Set by EngineOptions::fault, "kind:place:count".
//
//   throw:forward     the model fails: the sequences of that step end with an error
//   throw:sample      choosing the tokens throws: the same
//   throw:allocate    taking a K/V page throws: the same
//   nan:forward       the first row of logits is NaN: its sequence ends with an error, its neighbours go on
//   slow:forward      the step takes half a second longer
//   slow:sample       choosing the tokens does
//   no_pages:allocate taking a K/V page fails as if all were held: the sequence is preempted
//
// `count` is how often it happens, from the first opportunity on.
#pragma once

#include <cstdint>
#include <string_view>

namespace maga {

class Fault {
 public:
  enum class Kind : uint8_t { none, throws, nan, slow, no_pages };
  enum class Place : uint8_t { forward, sample, allocate };

  explicit Fault(std::string_view spec);  // throws Error naming what is valid; "": none

  // Whether the fault happens now; uses up one of its count.
  bool fires(Kind kind, Place place) {
    if (left_ == 0 || kind != kind_ || place != place_) return false;
    --left_;
    return true;
  }
  // Throws or sleeps if that is due at `place`.
  void act(Place place);

 private:
  Kind kind_ = Kind::none;
  Place place_ = Place::forward;
  int64_t left_ = 0;
};

}  // namespace maga
