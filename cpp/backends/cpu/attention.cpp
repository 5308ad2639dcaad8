// Which rows of a step go to which thread, and in what order.
#include "backends/cpu/attention.h"

#include <algorithm>

namespace maga::cpu {
namespace {

// Multiply-adds below which waking the other threads costs more than it brings.
constexpr double kWorthThreads = 64 * 1024;

}  // namespace

int64_t attention_scratch_floats(int64_t group, int64_t head_dim, int64_t v_dim) {
  const int64_t rows = std::max(kItemRows, group), values = round_up(v_dim, 16);
  constexpr int64_t kRounding = 16 * 16;  // each part starts at a multiple of 16 floats
  return rows * (head_dim + values + 2) + kMaxTileRows * (kSegmentTokens + values) + kSegmentTokens * (head_dim + values) +
         kRounding;
}

void AttentionPlan::add_row_blocks(const Batch& batch, int64_t rows) {
  const Step& step = batch.step();
  const int64_t block_tokens = std::max<int64_t>(1, rows / form_.group);
  blocks_.clear();
  cost_ = 0;
  for (int64_t s = 0; s < step.sequences(); ++s) {
    const int64_t begin = step.sequence_start[s], end = step.sequence_start[s + 1];
    const int64_t shift = step.kv_length[s] - end;  // K/V index of a token, less its row
    for (int64_t token = begin; token < end; token += block_tokens) {
      RowBlock block{};
      block.sequence = s;
      block.first_token = token;
      block.tokens = std::min(block_tokens, end - token);
      block.first_key = token + shift;
      const int64_t oldest = form_.window ? std::max<int64_t>(0, block.first_key + 1 - form_.window) : 0;
      const int64_t context = step.context.empty() ? 0 : step.context[s];
      const int64_t keys = step.tree.empty() ? std::max(block.first_key + block.tokens, context) : step.kv_length[s];
      block.segment_begin = oldest / kSegmentTokens;
      block.segment_end = (keys + kSegmentTokens - 1) / kSegmentTokens;
      block.cost = static_cast<double>(block.tokens * form_.group) * static_cast<double>(keys - oldest) *
                   static_cast<double>(form_.head_dim + form_.v_dim);
      block.partial = kNone;
      cost_ += block.cost * static_cast<double>(form_.kv_heads);
      blocks_.push_back(block);
    }
  }
}

// Row blocks that would keep one thread busy while the others have finished are cut into segments.
void AttentionPlan::split(int threads) {
  int64_t used = 0;
  split_blocks_.clear();
  if (threads == 1) return;
  const double share = cost_ / threads;
  for (size_t i = 0; i < blocks_.size(); ++i) {
    RowBlock& block = blocks_[i];
    const int64_t segments = block.segment_end - block.segment_begin;
    if (block.cost * 2 <= share) return;
    const int64_t floats = form_.kv_heads * segments * partial_floats(block.tokens * form_.group, form_.v_dim);
    if (segments == 1 || used + floats > capacity_) continue;
    block.partial = used;
    used += floats;
    split_blocks_.push_back(static_cast<int64_t>(i));
  }
}

int64_t AttentionPlan::partial_of(const RowBlock& block, int64_t kv_head, int64_t segment) const {
  const int64_t segments = block.segment_end - block.segment_begin;
  return block.partial +
         (kv_head * segments + segment - block.segment_begin) * partial_floats(block.tokens * form_.group, form_.v_dim);
}

void AttentionPlan::build(const Batch& batch, int threads) {
  // Fewer rows an item when there would be too few items to share out evenly.
  for (int64_t rows = kItemRows; rows >= kItemRows / 4; rows /= 2) {
    add_row_blocks(batch, rows);
    if (static_cast<int64_t>(blocks_.size()) * form_.kv_heads >= 4 * threads) break;
  }
  // The longest first: what is handed out last should be short.
  std::sort(blocks_.begin(), blocks_.end(), [](const RowBlock& a, const RowBlock& b) {
    return a.cost != b.cost ? a.cost > b.cost : a.first_token < b.first_token;
  });
  split(threads);
  items_.clear();
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const RowBlock& block = blocks_[i];
    for (int64_t head = 0; head < form_.kv_heads; ++head)
      if (block.partial == kNone)
        items_.push_back({static_cast<int64_t>(i), head, block.segment_begin, block.segment_end});
      else
        for (int64_t segment = block.segment_begin; segment < block.segment_end; ++segment)
          items_.push_back({static_cast<int64_t>(i), head, segment, segment + 1});
  }
}

void AttentionPlan::run(ThreadPool& threads, const AttentionKernels& kernels, const Batch& batch, const Call& call) const {
  const Step& step = batch.step();
  const AttentionShape shape{.group = form_.group,
                             .window = form_.window,
                             .scale = call.scale,
                             .soft_cap = call.soft_cap,
                             .slopes = call.slopes,
                             .sinks = call.sinks,
                             .layer = call.layer};
  const auto out_of = [&](const RowBlock& block, int64_t kv_head) {
    return call.out + block.first_token * call.out_stride + kv_head * form_.group * form_.v_dim;
  };
  const int64_t items = static_cast<int64_t>(items_.size());
  threads.parallel_for(items, cost_ < kWorthThreads ? items : 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t i = begin; i < end; ++i) {
      const Item& item = items_[i];
      const RowBlock& block = blocks_[item.block];
      kernels.attend(
          shape,
          {.q = call.q + block.first_token * call.q_stride + item.kv_head * form_.group * form_.head_dim,
           .q_stride = call.q_stride,
           .out = out_of(block, item.kv_head),
           .out_stride = call.out_stride,
           .tokens = block.tokens,
           .first_key = block.first_key,
           .pages = step.pages.data() + step.page_start[block.sequence],
           .tree = step.tree.empty() ? nullptr : step.tree.data() + block.first_token,
           .first_new =
               step.kv_length[block.sequence] - (step.sequence_start[block.sequence + 1] - step.sequence_start[block.sequence]),
           .context = step.context.empty() ? 0 : step.context[block.sequence],
           .kv_head = item.kv_head,
           .segment_begin = item.segment_begin,
           .segment_end = item.segment_end,
           .partial = block.partial == kNone ? nullptr : partials_ + partial_of(block, item.kv_head, item.segment_begin)},
          call.scratch + thread * call.scratch_floats);
    }
  });
  if (split_blocks_.empty()) return;
  threads.parallel_for(static_cast<int64_t>(split_blocks_.size()) * form_.kv_heads, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const RowBlock& block = blocks_[split_blocks_[i / form_.kv_heads]];
      const int64_t kv_head = i % form_.kv_heads;
      kernels.merge({.partials = partials_ + partial_of(block, kv_head, block.segment_begin),
                     .segments = block.segment_end - block.segment_begin,
                     .out = out_of(block, kv_head),
                     .out_stride = call.out_stride,
                     .tokens = block.tokens,
                     .group = form_.group,
                     .v_dim = form_.v_dim,
                     .sinks = call.sinks ? call.sinks + kv_head * form_.group : nullptr});
    }
  });
}

}  // namespace maga::cpu
