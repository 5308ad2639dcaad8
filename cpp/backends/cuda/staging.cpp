#include "backends/cuda/staging.h"

#include <algorithm>

#include "backends/cuda/cuda_check.h"

namespace maga::cuda {

StepLayout::StepLayout(const StepShape& shape) {
  int64_t end = 0;
  const auto place = [&](int64_t count, size_t size) {
    const int64_t at = end;
    end = (end + count * static_cast<int64_t>(size) + 15) / 16 * 16;
    return at;
  };
  slots = place(shape.tokens, sizeof(int64_t));
  tree = place(shape.tree ? shape.tokens : 0, sizeof(uint64_t));
  draws = place(shape.draws, sizeof(Draw));
  ids = place(shape.tokens, sizeof(int32_t));
  positions = place(shape.tokens, sizeof(int32_t));
  token_sequence = place(shape.tokens, sizeof(int32_t));
  sequence_start = place(shape.sequences + 1, sizeof(int32_t));
  kv_length = place(shape.sequences, sizeof(int32_t));
  prompt_length = place(shape.sequences, sizeof(int32_t));
  page_start = place(shape.sequences + 1, sizeof(int32_t));
  logit_rows = place(shape.rows, sizeof(int32_t));
  context = place(shape.context ? shape.sequences : 0, sizeof(int32_t));
  block_positions = place(shape.blocks ? shape.tokens : 0, sizeof(int32_t));
  pages = end;
}

Staging::Staging(const Limits& limits, int64_t page_ids) : page_tokens_(limits.page_tokens), page_ids_(page_ids) {
  const StepLayout largest({.tokens = static_cast<int>(limits.tokens),
                            .sequences = static_cast<int>(limits.sequences),
                            .rows = static_cast<int>(limits.logit_rows),
                            .draws = static_cast<int>(limits.logit_rows),
                            .tree = true,
                            .context = true,
                            .blocks = true});
  for (PinnedMemory& memory : pinned_) memory = PinnedMemory(largest.bytes(page_ids), "steps");
  device_ = DeviceMemory(largest.bytes(page_ids), "steps");
}

void Staging::stage(const Queue& queue, int slot, const StepShape& shape, const Step& step, std::span<const Draw> draws,
                    bool keeps_kv) {
  const StepLayout layout(shape);
  const auto page_ids = static_cast<int64_t>(step.pages.size());
  MAGA_CHECK(page_ids <= page_ids_, page_ids, " page ids in a step, at most ", page_ids_, " fit");
  std::byte* base = pinned_[slot].data();
  // Copies an array and fills what is left of its `count`.
  const auto put = [&](int64_t at, std::span<const int32_t> values, int64_t count, int32_t padding) {
    auto* to = reinterpret_cast<int32_t*>(base + at);
    std::fill(std::copy(values.begin(), values.end(), to), to + count, padding);
  };
  const auto tokens = static_cast<int32_t>(step.tokens());
  put(layout.ids, step.ids, shape.tokens, 0);
  put(layout.positions, step.positions, shape.tokens, 0);
  put(layout.sequence_start, step.sequence_start, shape.sequences + 1, tokens);
  put(layout.kv_length, step.kv_length, shape.sequences, 0);
  put(layout.prompt_length, step.prompt_length, shape.sequences, 0);
  put(layout.page_start, step.page_start, shape.sequences + 1, static_cast<int32_t>(page_ids));
  put(layout.logit_rows, step.logit_rows, shape.rows, 0);
  put(layout.pages, step.pages, page_ids, 0);
  if (shape.context) put(layout.context, step.context, shape.sequences, 0);
  if (shape.blocks) put(layout.block_positions, step.block_positions, shape.tokens, 0);

  std::copy(step.tree.begin(), step.tree.end(), reinterpret_cast<uint64_t*>(base + layout.tree));
  auto* to_draws = reinterpret_cast<Draw*>(base + layout.draws);
  std::fill(std::copy(draws.begin(), draws.end(), to_draws), to_draws + shape.draws, Draw{.row = -1});

  auto* slots = reinterpret_cast<int64_t*>(base + layout.slots);
  auto* token_sequence = reinterpret_cast<int32_t*>(base + layout.token_sequence);
  std::fill_n(slots, shape.tokens, int64_t{-1});
  std::fill_n(token_sequence, shape.tokens, 0);
  for (int64_t s = 0; s < step.sequences(); ++s) {
    const int64_t end = step.sequence_start[s + 1];
    for (int64_t token = step.sequence_start[s]; token < end; ++token) {
      token_sequence[token] = static_cast<int32_t>(s);
      if (!keeps_kv) continue;
      const int64_t index = step.kv_length[s] - (end - token);
      slots[token] = step.pages[step.page_start[s] + index / page_tokens_] * page_tokens_ + index % page_tokens_;
    }
  }
  MAGA_CUDA(
      cudaMemcpyAsync(device_.data(), base, static_cast<size_t>(layout.bytes(page_ids)), cudaMemcpyHostToDevice, queue.stream));
}

DeviceStep Staging::step(const StepShape& shape) const {
  const StepLayout layout(shape);
  const auto array = [&](int64_t at) { return reinterpret_cast<const int32_t*>(device_.data() + at); };
  return {.tokens = shape.tokens,
          .sequences = shape.sequences,
          .rows = shape.rows,
          .ids = array(layout.ids),
          .positions = array(layout.positions),
          .sequence_start = array(layout.sequence_start),
          .kv_length = array(layout.kv_length),
          .prompt_length = array(layout.prompt_length),
          .page_start = array(layout.page_start),
          .pages = array(layout.pages),
          .slots = reinterpret_cast<const int64_t*>(device_.data() + layout.slots),
          .token_sequence = array(layout.token_sequence),
          .logit_rows = array(layout.logit_rows),
          .tree_mask = shape.tree ? reinterpret_cast<const uint64_t*>(device_.data() + layout.tree) : nullptr,
          .context = shape.context ? array(layout.context) : nullptr,
          .block_positions = shape.blocks ? array(layout.block_positions) : nullptr};
}

const Draw* Staging::draws(const StepShape& shape) const {
  return reinterpret_cast<const Draw*>(device_.data() + StepLayout(shape).draws);
}

}  // namespace maga::cuda
