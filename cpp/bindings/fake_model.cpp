// One 64-bit entry per token in the pages, folded over a sequence into the seed of its logits.
#include "bindings/fake_model.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

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
  program_.values.push_back({.name = "logits", .width = options.vocab, .rows = Rows::logits});
  program_.logits = 0;
  program_.embeds = options.embeds;
  if (options.embeds) program_.ops.push_back(Pool{});
  if (options.length_dependent_from > 0) {
    RopeTable table;
    table.dynamic_factor = 2;
    table.max_positions = options.length_dependent_from - 1;
    program_.rope_tables.push_back(table);
  }
  if (options.long_from > 0) {
    RopeTable table;
    table.long_inv_freq = {1};
    table.max_positions = options.long_from - 1;
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
  bool prompts = false;
  std::vector<int64_t> writer(limits_.pages, -1);
  for (int64_t s = 0; s < step.sequences(); ++s) {
    const int64_t length = step.kv_length[s], added = step.sequence_start[s + 1] - step.sequence_start[s];
    MAGA_CHECK(added > 0 && added <= length, "sequence ", s, " brings ", added, " tokens of ", length);
    MAGA_CHECK(added > 1 || !prompts, "sequence ", s, " brings one token and comes after one that brings more");
    prompts |= added > 1;
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

void FakeModel::check_ids(const Step& step, int64_t draws_before) const {
  for (const int32_t id : step.ids)
    MAGA_CHECK(id < options_.vocab && -1 - id < draws_before, "the id ", id, " is neither a token nor one of ", draws_before,
               " draws of the step before");
}

void FakeModel::check_draws(const Step& step, std::span<const Draw> draws) const {
  MAGA_CHECK(static_cast<int64_t>(draws.size()) <= limits_.logit_rows, draws.size(), " draws are more than the limit");
  for (const Draw& draw : draws) {
    MAGA_CHECK(draw.row >= 0 && draw.row < static_cast<int64_t>(step.logit_rows.size()), "draw of row ", draw.row);
    MAGA_CHECK(std::isfinite(draw.temperature) && draw.temperature >= 0 && draw.top_k >= 0 && draw.top_p > 0 && draw.top_p <= 1 &&
                   draw.min_p >= 0 && draw.min_p <= 1,
               "a draw is out of range");
  }
}

void FakeModel::wait_and_record(const Step& step, int64_t draws, bool ahead) {
  std::unique_lock lock(control_->mutex);
  control_->waiting = control_->held;
  control_->changed.notify_all();
  control_->changed.wait(lock, [&] { return !control_->held; });
  control_->waiting = false;
  FakeStep record{.tokens = step.tokens(),
                  .kv_length = {step.kv_length.begin(), step.kv_length.end()},
                  .sequence_tokens = {},
                  .draws = draws,
                  .ahead = ahead};
  for (int64_t s = 0; s < step.sequences(); ++s)
    record.sequence_tokens.push_back(step.sequence_start[s + 1] - step.sequence_start[s]);
  control_->steps.push_back(std::move(record));
}

bool FakeModel::lost() const {
  const std::lock_guard lock(control_->mutex);
  return control_->lost;
}

void FakeModel::run(const Step& step) {
  MAGA_CHECK(!options_.asynchronous, "the steps of an asynchronous model are enqueued");
  wait_and_record(step, 0, false);
  check(step);
  check_ids(step, 0);
  forward(step);
}

std::span<const float> FakeModel::logits() {
  MAGA_CHECK(queue_.empty(), "logits are gone once the next step is enqueued");
  return logits_;
}

Step FakeModel::Queued::step() const {
  return {.ids = ids,
          .positions = positions,
          .sequence_start = sequence_start,
          .kv_length = kv_length,
          .prompt_length = prompt_length,
          .page_start = page_start,
          .pages = pages,
          .logit_rows = logit_rows,
          .tree = {},
          .context = {},
          .block_positions = {}};
}

void FakeModel::enqueue(const Step& step, std::span<const Draw> draws) {
  MAGA_CHECK(options_.asynchronous, "this model runs its steps at once");
  MAGA_CHECK(queue_.size() < kStepsInFlight, "too many steps are in flight");
  {
    std::lock_guard lock(control_->mutex);
    if (control_->fail_enqueue > 0 && control_->fail_enqueue--) throw Error(ErrorKind::internal, "the fake device takes no step");
  }
  check(step);
  check_ids(step, queue_.empty() ? 0 : static_cast<int64_t>(queue_.back().draws.size()));
  check_draws(step, draws);
  const auto copy = [](std::span<const int32_t> values) { return std::vector<int32_t>(values.begin(), values.end()); };
  queue_.push_back({.ids = copy(step.ids),
                    .positions = copy(step.positions),
                    .sequence_start = copy(step.sequence_start),
                    .kv_length = copy(step.kv_length),
                    .prompt_length = copy(step.prompt_length),
                    .page_start = copy(step.page_start),
                    .pages = copy(step.pages),
                    .logit_rows = copy(step.logit_rows),
                    .draws = {draws.begin(), draws.end()},
                    .copies_before = std::exchange(copies_, {}),
                    .ahead = !queue_.empty()});
}

std::span<const Drawn> FakeModel::collect() {
  MAGA_CHECK(!queue_.empty(), "no step is in flight");
  Queued queued = std::move(queue_.front());
  queue_.pop_front();
  wait_and_record(queued.step(), static_cast<int64_t>(queued.draws.size()), queued.ahead);
  for (const auto& [from, to] : queued.copies_before) copy_now(from, to);
  for (int32_t& id : queued.ids)
    if (id < 0) id = drawn_[-1 - id].token;
  forward(queued.step());
  drawn_.clear();
  for (const Draw& d : queued.draws) drawn_.push_back(draw(d));
  std::lock_guard lock(control_->mutex);
  if (control_->fail_collect > 0 && control_->fail_collect--) throw Error(ErrorKind::internal, "the fake device lost a step");
  return drawn_;
}

// By the host's own chain, so that texts do not depend on where a token is chosen.
Drawn FakeModel::draw(const Draw& draw) {
  SamplingParams params;
  params.temperature = draw.temperature;
  params.top_k = draw.top_k;
  params.top_p = draw.top_p;
  params.min_p = draw.min_p;
  Sampled result;
  sample({.logits = std::span<const float>(logits_).subspan(draw.row * options_.vocab, options_.vocab),
          .params = &params,
          .counts = nullptr,
          .tokens = {},
          .output_tokens = static_cast<int64_t>(draw.index),
          .allowed = {},
          .seed = draw.seed,
          .stream = draw.stream},
         &scratch_, &result);
  const bool finite = result.status != Sampled::Status::non_finite;
  return {.token = finite ? result.token : static_cast<int32_t>(options_.vocab) - 1, .finite = finite};
}

void FakeModel::forward(const Step& step) {
  logits_.resize(step.logit_rows.size() * options_.vocab);
  for (int64_t s = 0; s < step.sequences(); ++s) {
    const int64_t first = step.sequence_start[s], last = step.sequence_start[s + 1];
    for (int64_t t = first; t < last; ++t) {
      const int64_t index = step.kv_length[s] - (last - t);
      const int64_t length = std::max<int64_t>(step.prompt_length[s], step.positions[t] + 1);
      const bool long_rope = options_.length_dependent_from > 0 && length >= options_.length_dependent_from;
      const bool is_long = options_.long_from > 0 && length >= options_.long_from;
      entry(step, s, index) = (long_rope ? static_cast<uint64_t>(length) << 32 : uint64_t{is_long} << 63) + step.ids[t] + 1;
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
  MAGA_CHECK(std::min(from, to) >= 0 && std::max(from, to) < limits_.pages, "copy of page ", from, " to ", to);
  if (options_.asynchronous)
    copies_.emplace_back(from, to);
  else
    copy_now(from, to);
}

void FakeModel::copy_now(int32_t from, int32_t to) {
  std::copy_n(pages_.begin() + from * limits_.page_tokens, limits_.page_tokens, pages_.begin() + to * limits_.page_tokens);
}

void FakeModel::write_value(ValueId, std::span<const float>) { MAGA_CHECK(false, "a fake model has no values"); }
std::vector<float> FakeModel::read_value(ValueId, int64_t) { MAGA_CHECK(false, "a fake model has no values"); }

std::shared_ptr<const Weight> FakeBackend::pack(const WeightSpec& spec, const Canonical&) {
  MAGA_CHECK(false, "a fake backend takes no weights: ", spec.name);
}
std::unique_ptr<WeightStack> FakeBackend::stack(const WeightSpec& spec) {
  MAGA_CHECK(false, "a fake backend takes no weights: ", spec.name);
}
std::unique_ptr<Executable> FakeBackend::load(const Program&, std::vector<std::shared_ptr<const Weight>>, const Limits&) {
  MAGA_CHECK(false, "a fake backend loads no programs");
}

}  // namespace maga
