// The table of known faults is the only place that names them.
#include "engine/fault.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <new>
#include <thread>
#include <utility>

#include "core/check.h"

namespace maga {
namespace {

using Kind = Fault::Kind;
using Place = Fault::Place;

template <typename Value>
struct Named {
  std::string_view name;
  Value value;
};
constexpr Named<Kind> kKinds[] = {{"throw", Kind::throws},
                                  {"memory", Kind::memory},
                                  {"slow", Kind::slow},
                                  {"nan", Kind::nan},
                                  {"no_pages", Kind::no_pages},
                                  {"disk_full", Kind::disk_full},
                                  {"closed_pipe", Kind::closed_pipe},
                                  {"clock", Kind::clock}};
constexpr Named<Place> kPlaces[] = {{"admit", Place::admit},   {"allocate", Place::allocate}, {"forward", Place::forward},
                                    {"sample", Place::sample}, {"commit", Place::commit},     {"emit", Place::emit},
                                    {"loop", Place::loop}};

constexpr auto kSlow = std::chrono::milliseconds(500);
constexpr int64_t kJump = 3600;  // seconds
constexpr const char* kJumpClock = "maga_jump_clock";

bool makes_sense(Kind kind, Place place) {
  if (kind == Kind::nan) return place == Place::forward;
  if (kind == Kind::no_pages) return place == Place::allocate;
  return place != Place::loop || kind == Kind::throws;
}

std::string valid_faults() {
  std::string valid;
  for (const auto& kind : kKinds)
    for (const auto& place : kPlaces)
      if (makes_sense(kind.value, place.value)) valid += concat(valid.empty() ? "" : ", ", kind.name, ':', place.name);
  return valid;
}

template <typename Value, size_t count>
const Named<Value>* find(const Named<Value> (&table)[count], std::string_view name) {
  const auto at = std::find_if(std::begin(table), std::end(table), [&](const auto& entry) { return entry.name == name; });
  return at == std::end(table) ? nullptr : at;
}

std::string_view next_part(std::string_view* rest) {
  const size_t colon = std::min(rest->find(':'), rest->size());
  const std::string_view part = rest->substr(0, colon);
  rest->remove_prefix(std::min(colon + 1, rest->size()));
  return part;
}

int64_t number(std::string_view text, int64_t least, std::string_view spec, const char* name) {
  int64_t value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  MAGA_REQUIRE(error == std::errc{} && end == text.data() + text.size() && value >= least, "fault '", spec, "': ", name, " '", text,
               "' must be a number from ", least, " on");
  return value;
}

// stdout and stderr become `file`, which is closed.
void replace_outputs(int file) {
  MAGA_CHECK(file >= 0, "a file for the outputs could not be opened");
  for (const int output : {STDOUT_FILENO, STDERR_FILENO}) dup2(file, output);
  close(file);
}

void close_outputs() {
  int ends[2];
  MAGA_CHECK(pipe(ends) == 0, "pipe failed");
  close(ends[0]);
  replace_outputs(ends[1]);
}

using JumpClock = void (*)(int64_t seconds);
JumpClock jump_clock() { return reinterpret_cast<JumpClock>(dlsym(RTLD_DEFAULT, kJumpClock)); }

}  // namespace

Fault::Fault(std::string_view spec) {
  if (spec.empty()) return;
  std::string_view rest = spec;
  const auto* kind = find(kKinds, next_part(&rest));
  const auto* place = find(kPlaces, next_part(&rest));
  if (!kind || !place || !makes_sense(kind->value, place->value))
    throw Error(
        ErrorKind::invalid,
        concat("fault '", spec, "' must be kind:place:count or kind:place:count:after with kind:place one of ", valid_faults()));
  const std::string_view count = next_part(&rest);
  left_ = number(count, 1, spec, "the count");
  if (!rest.empty()) after_ = number(rest, 0, spec, "what comes before it,");
  kind_ = kind->value;
  place_ = place->value;
  MAGA_REQUIRE(kind_ != Kind::clock || jump_clock(), "fault '", spec, "' needs a clock that jumps: tests/soak/clock.c, preloaded");
}

void Fault::act_now(Place place) {
  if (fires(Kind::throws, place)) throw Error(ErrorKind::internal, "injected fault");
  if (fires(Kind::memory, place)) throw std::bad_alloc();
  if (fires(Kind::slow, place)) std::this_thread::sleep_for(kSlow);
  if (fires(Kind::disk_full, place)) replace_outputs(open("/dev/full", O_WRONLY | O_CLOEXEC));
  if (fires(Kind::closed_pipe, place)) close_outputs();
  if (fires(Kind::clock, place)) jump_clock()(std::exchange(ahead_, !ahead_) ? -kJump : kJump);
}

}  // namespace maga
