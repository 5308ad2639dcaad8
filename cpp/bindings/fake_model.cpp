// One 64-bit entry per token in the pages, folded over a sequence into the seed of its logits.
#include "bindings/fake_model.h"

#include <algorithm>
#include <limits>

#include "core/check.h"

namespace maga {
namespace {

uint64_t fold(uint64_t hash, uint64_t entry) {
  hash = (hash ^ entry) * 0x9e3779b97f4a7c15u;
  return hash ^ (hash >> 29);
}

// In [-4, 4), a multiple of 2^-21: exact in fp32.
float logit_of(uint64_t hash, int64_t token) {
  uint64_t x = hash + static_cast<uint64_t>(token) * 0xd1342543de82ef95u;
  x = (x ^ (x >> 32)) * 0xaf251af3b0f025b5u;
  x ^= x >> 32;
  return static_cast<float>(x >> 40) * 0x1p-21f - 4.0f;
}

}  // namespace

FakeModel::FakeModel(const FakeOptions& options, const Limits& limits, std::shared_ptr<FakeControl> control)
    : options_(options), limits_(limits), control_(std::move(control)), pages_(limits.pages * limits.page_tokens, ~uint64_t{0}) {
  program_.family = "fake";
  program_.vocab = options.vocab;
  program_.max_positions = options.max_positions;
  if (options.length_dependent_from > 0) {
    RopeTable table;
    table.dynamic_factor = 2;
    table.max_positions = options.length_dependent_from - 1;
    program_.rope_tables.push_back(table);
  }
}

uint64_t& FakeModel::entry(const Step& step, int64_t sequence, int64_t index) {
  const int32_t page = step.pages[step.page_start[sequence] + index / limits_.page_tokens];
  return pages_[page * limits_.page_tokens + index % limits_.page_tokens];
}

// What every step must keep to: sizes within the limits, tables long enough, and no page written that another sequence reads.
void FakeModel::check(const Step& step) {
  MAGA_CHECK(step.tokens() <= limits_.tokens && step.sequences() <= limits_.sequences &&
                 static_cast<int64_t>(step.logit_rows.size()) <= limits_.logit_rows,
             "the step is larger than the limits");
  std::vector<int64_t> writer(limits_.pages, -1);
  for (int64_t s = 0; s < step.sequences(); ++s) {
    const int64_t length = step.kv_length[s], added = step.sequence_start[s + 1] - step.sequence_start[s];
    MAGA_CHECK(added > 0 && added <= length, "sequence ", s, " brings ", added, " tokens of ", length);
    const int64_t pages = step.page_start[s + 1] - step.page_start[s];
    MAGA_CHECK(pages == (length + limits_.page_tokens - 1) / limits_.page_tokens, "sequence ", s, " has ", pages, " pages");
    for (int64_t i = length - added; i < length; ++i) {
      MAGA_CHECK(step.positions[step.sequence_start[s] + i - (length - added)] == i, "sequence ", s, " has a wrong position");
      writer[step.pages[step.page_start[s] + i / limits_.page_tokens]] = s;
    }
  }
  for (int64_t s = 0; s < step.sequences(); ++s)
    for (int32_t p = step.page_start[s]; p < step.page_start[s + 1]; ++p) {
      MAGA_CHECK(step.pages[p] >= 0 && step.pages[p] < limits_.pages, "page ", step.pages[p], " does not exist");
      MAGA_CHECK(writer[step.pages[p]] == -1 || writer[step.pages[p]] == s, "page ", step.pages[p], " is written while shared");
    }
}

void FakeModel::run(const Step& step) {
  {
    std::unique_lock lock(control_->mutex);
    control_->waiting = control_->held;
    control_->changed.notify_all();
    control_->changed.wait(lock, [&] { return !control_->held; });
    control_->waiting = false;
    FakeStep record{.tokens = step.tokens(), .kv_length = {step.kv_length.begin(), step.kv_length.end()}, .sequence_tokens = {}};
    for (int64_t s = 0; s < step.sequences(); ++s)
      record.sequence_tokens.push_back(step.sequence_start[s + 1] - step.sequence_start[s]);
    control_->steps.push_back(std::move(record));
  }
  check(step);
  logits_.resize(step.logit_rows.size() * options_.vocab);
  for (int64_t s = 0; s < step.sequences(); ++s) {
    const int64_t first = step.sequence_start[s], last = step.sequence_start[s + 1];
    for (int64_t t = first; t < last; ++t) {
      const int64_t index = step.kv_length[s] - (last - t);
      const int64_t length = std::max<int64_t>(step.prompt_length[s], step.positions[t] + 1);
      const bool long_rope = options_.length_dependent_from > 0 && length >= options_.length_dependent_from;
      entry(step, s, index) = (long_rope ? static_cast<uint64_t>(length) << 32 : 0) + step.ids[t] + 1;
    }
  }
  for (size_t row = 0; row < step.logit_rows.size(); ++row) {
    const int32_t token = step.logit_rows[row];
    const auto after = std::upper_bound(step.sequence_start.begin(), step.sequence_start.end(), token);
    const int64_t s = after - step.sequence_start.begin() - 1;
    const int64_t length = step.kv_length[s] - (step.sequence_start[s + 1] - token) + 1;
    uint64_t hash = 0;
    bool poisoned = false;
    for (int64_t i = 0; i < length; ++i) {
      hash = fold(hash, entry(step, s, i));
      poisoned |= options_.poison >= 0 && (entry(step, s, i) & 0xffffffffu) == static_cast<uint32_t>(options_.poison) + 1;
    }
    float* logits = logits_.data() + row * options_.vocab;
    for (int64_t v = 0; v < options_.vocab; ++v) logits[v] = poisoned ? std::numeric_limits<float>::quiet_NaN() : logit_of(hash, v);
  }
}

void FakeModel::copy_page(int32_t from, int32_t to) {
  std::copy_n(pages_.begin() + from * limits_.page_tokens, limits_.page_tokens, pages_.begin() + to * limits_.page_tokens);
}

void FakeModel::write_value(ValueId, std::span<const float>) { MAGA_CHECK(false, "a fake model has no values"); }
std::vector<float> FakeModel::read_value(ValueId, int64_t) { MAGA_CHECK(false, "a fake model has no values"); }

std::shared_ptr<const Weight> FakeBackend::pack(const WeightSpec& spec, const Canonical&) {
  MAGA_CHECK(false, "a fake backend takes no weights: ", spec.name);
}
std::unique_ptr<Executable> FakeBackend::load(const Program&, std::vector<std::shared_ptr<const Weight>>, const Limits&) {
  MAGA_CHECK(false, "a fake backend loads no programs");
}

}  // namespace maga
