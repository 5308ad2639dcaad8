// Greedy placement by size: the largest value first, each at the lowest offset that is free for the whole of its life.
#include "program/buffers.h"

#include <algorithm>
#include <numeric>

#include "program/access.h"

namespace maga {
namespace {

struct Life {
  int64_t begin = 0, end = -1;  // first and last op that touch the value
  bool overlaps(const Life& other) const { return begin <= other.end && other.begin <= end; }
};

std::vector<Life> lives_of(const Program& program, const std::vector<LateRead>& late_reads) {
  const int64_t ops = static_cast<int64_t>(program.ops.size());
  std::vector<Life> lives(program.values.size(), Life{ops, -1});
  for (int64_t i = 0; i < ops; ++i) {
    const auto touch = [&](const View& view) {
      Life& life = lives[view.value];
      life.begin = std::min(life.begin, i);
      life.end = i;
    };
    for (const View& view : reads(program.ops[i])) touch(view);
    touch(written(program.ops[i]));
  }
  for (const LateRead& read : late_reads) lives[read.value].end = std::max(lives[read.value].end, read.op);
  const auto keep = [&](ValueId value) {
    if (value != kNone) lives[value] = {0, ops};
  };
  for (const ValueId value : program.inputs) keep(value);
  for (const ValueId value : program.outputs) keep(value);
  keep(program.logits);
  return lives;
}

}  // namespace

BufferPlan plan_buffers(const Program& program, const std::vector<int64_t>& bytes, int64_t alignment,
                        const std::vector<LateRead>& late_reads) {
  const std::vector<Life> lives = lives_of(program, late_reads);
  BufferPlan plan{.offset = std::vector<int64_t>(program.values.size(), 0)};
  std::vector<ValueId> order(program.values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](ValueId a, ValueId b) { return bytes[a] > bytes[b]; });

  std::vector<ValueId> placed;  // by offset
  for (const ValueId value : order) {
    if (lives[value].end < 0) continue;  // no op touches it
    int64_t offset = 0;
    for (const ValueId other : placed) {
      if (!lives[value].overlaps(lives[other])) continue;
      if (offset + bytes[value] <= plan.offset[other]) break;
      offset = std::max(offset, plan.offset[other] + bytes[other]);
      offset = (offset + alignment - 1) / alignment * alignment;
    }
    plan.offset[value] = offset;
    plan.bytes = std::max(plan.bytes, offset + bytes[value]);
    placed.insert(std::upper_bound(placed.begin(), placed.end(), value,
                                   [&](ValueId a, ValueId b) { return plan.offset[a] < plan.offset[b]; }),
                  value);
  }
  return plan;
}

}  // namespace maga
