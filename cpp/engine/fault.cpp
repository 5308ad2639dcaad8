// The table of known faults is the only place that names them.
#include "engine/fault.h"

#include <charconv>
#include <chrono>
#include <thread>

#include "core/check.h"

namespace maga {
namespace {

using Kind = Fault::Kind;
using Place = Fault::Place;

struct Known {
  std::string_view name;
  Kind kind;
  Place place;
};
constexpr Known kKnown[] = {{"throw:forward", Kind::throws, Place::forward},       {"throw:sample", Kind::throws, Place::sample},
                            {"throw:allocate", Kind::throws, Place::allocate},     {"nan:forward", Kind::nan, Place::forward},
                            {"slow:forward", Kind::slow, Place::forward},          {"slow:sample", Kind::slow, Place::sample},
                            {"no_pages:allocate", Kind::no_pages, Place::allocate}};

constexpr auto kSlow = std::chrono::milliseconds(500);

}  // namespace

Fault::Fault(std::string_view spec) {
  if (spec.empty()) return;
  const size_t colon = spec.rfind(':');
  const std::string_view name = spec.substr(0, colon);
  const std::string_view count = colon == std::string_view::npos ? "" : spec.substr(colon + 1);
  std::string valid;
  for (const Known& known : kKnown) {
    valid += concat(valid.empty() ? "" : ", ", known.name);
    if (known.name != name) continue;
    const auto [end, error] = std::from_chars(count.data(), count.data() + count.size(), left_);
    MAGA_REQUIRE(error == std::errc{} && end == count.data() + count.size() && left_ > 0, "fault '", spec, "': the count '", count,
                 "' must be a positive number");
    kind_ = known.kind;
    place_ = known.place;
    return;
  }
  throw Error(ErrorKind::invalid, concat("fault '", spec, "' must be kind:place:count with kind:place one of ", valid));
}

void Fault::act(Place place) {
  if (fires(Kind::throws, place)) throw Error(ErrorKind::internal, "injected fault");
  if (fires(Kind::slow, place)) std::this_thread::sleep_for(kSlow);
}

}  // namespace maga
