// Which columns an op reads and writes: what passes over a program (validate, fuse, buffer planning) need to know of it.
#pragma once

#include <array>

#include "core/overloaded.h"
#include "program/ops.h"

namespace maga {

// At most four views, empty ones left out.
class Views {
 public:
  template <typename... Each>
  explicit Views(const Each&... each) {
    ((each ? void(items_[count_++] = each) : void()), ...);
  }
  const View* begin() const { return items_.data(); }
  const View* end() const { return items_.data() + count_; }

 private:
  std::array<View, 4> items_;
  int count_ = 0;
};

inline bool overlap(const View& a, const View& b) {
  return a && a.value == b.value && a.offset < b.offset + b.width && b.offset < a.offset + a.width;
}

inline bool covers(const View& outer, const View& inner) {
  return outer && outer.value == inner.value && outer.offset <= inner.offset &&
         inner.offset + inner.width <= outer.offset + outer.width;
}

inline Views reads(const Op& op) {
  return std::visit(
      Overloaded{[](const Embed&) { return Views(); },  //
                 [](const AddPositions& o) { return Views(o.in); }, [](const LogScale& o) { return Views(o.x); },
                 [](const Bound& o) { return Views(o.in); }, [](const HeadLinear& o) { return Views(o.in); },
                 [](const Norm& o) { return Views(o.in); }, [](const Linear& o) { return Views(o.in, o.residual); },
                 [](const Rope& o) { return Views(o.x); }, [](const Attention& o) { return Views(o.q, o.k, o.v); },
                 [](const Activation& o) { return Views(o.gate, o.up); }, [](const Add& o) { return Views(o.a, o.b); },
                 [](const Select& o) { return Views(o.in); }, [](const Pool& o) { return Views(o.in); },
                 [](const Moe& o) { return Views(o.in, o.logits, o.residual); }, [](const GatedLinear& o) { return Views(o.in); },
                 [](const PrepareQkv& o) { return Views(o.q, o.k, o.v); }},
      op);
}

// Every op writes exactly one view.
inline View written(const Op& op) {
  return std::visit(Overloaded{[](const Rope& o) { return o.x; }, [](const LogScale& o) { return o.x; },
                               [](const PrepareQkv& o) { return o.q; }, [](const auto& o) { return o.out; }},
                    op);
}

}  // namespace maga
