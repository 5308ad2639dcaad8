// A program in parts, which run one after the other: a layer at a time, with no other layer's weights in memory.
#pragma once

#include <span>
#include <vector>

#include "program/program.h"

namespace maga {

// A place where a program can be cut: between ops `op` - 1 and `op` one value is needed of what was computed so far.
struct Cut {
  int64_t op = 0;
  ValueId value = kNone;
};
std::vector<Cut> cuts(const Program& program);

// The ops [first, last) as a program of its own: with the values of the whole, but only the weights and cache layers that those ops
// use. What they read and do not write becomes inputs; `outputs` are kept readable.
Program part(const Program& program, int64_t first, int64_t last, std::span<const ValueId> outputs);

}  // namespace maga
