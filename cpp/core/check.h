// The one exception type of the core, and the checks that throw it with the values that failed.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace maga {

// What went wrong, so that the bindings raise the matching Python exception.
enum class ErrorKind {
  invalid,   // a caller's argument: ValueError
  missing,   // a file or name that does not exist: FileNotFoundError
  busy,      // a bounded queue is full, try again later: maga_transformer.BusyError
  internal,  // a broken invariant of ours: maga_transformer.MagaError
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace maga

// MAGA_CHECK(condition, message parts...): a broken invariant. Message parts are streamed one after another.
#define MAGA_CHECK(condition, ...)                                                                       \
  do {                                                                                                   \
    if (!(condition)) [[unlikely]]                                                                       \
      throw ::maga::Error(::maga::ErrorKind::internal,                                                   \
                          ::maga::concat(__FILE__, ":", __LINE__, ": ", #condition, ": ", __VA_ARGS__)); \
  } while (false)

// MAGA_REQUIRE(condition, message parts...): a caller's mistake; the message is all that the user sees.
#define MAGA_REQUIRE(condition, ...)                                                \
  do {                                                                              \
    if (!(condition)) [[unlikely]]                                                  \
      throw ::maga::Error(::maga::ErrorKind::invalid, ::maga::concat(__VA_ARGS__)); \
  } while (false)
