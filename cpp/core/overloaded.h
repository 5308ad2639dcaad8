// A visitor for std::visit, made of one lambda per alternative.
#pragma once

namespace maga {

template <typename... Cases>
struct Overloaded : Cases... {
  using Cases::operator()...;
};
template <typename... Cases>
Overloaded(Cases...) -> Overloaded<Cases...>;

}  // namespace maga
