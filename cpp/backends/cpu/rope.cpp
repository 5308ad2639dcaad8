// The table grows by doubling as longer positions come up.
#include "backends/cpu/rope.h"

#include <algorithm>
#include <cmath>

namespace maga::cpu {
namespace {

constexpr int64_t kFirstPositions = 512;
// A position is multiplied as fp32, exact up to here; it also bounds the table when a step is broken.
constexpr int64_t kMaxPosition = int64_t{1} << 24;

}  // namespace

RopeTurns::RopeTurns(const RopeTable& table, int64_t max_tokens)
    : table_(table), row_floats_(table.rotary_dim * (table.interleaved ? 2 : 1)), tokens_(max_tokens) {
  MAGA_CHECK(static_cast<int64_t>(table.inv_freq.size()) * 2 == table.rotary_dim, table.inv_freq.size(), " frequencies for ",
             table.rotary_dim, " rotated columns");
  if (table.by_length()) {
    stretched_.resize(max_tokens * row_floats_);
    stretched_freq_.resize(table.inv_freq.size());
  }
}

// As transformers does: fp32 frequency times fp32 position, then the cosine of that fp32 angle.
void RopeTurns::fill(const float* inv_freq, int64_t position, float* row) const {
  const int64_t half = table_.rotary_dim / 2;
  for (int64_t j = 0; j < half; ++j) {
    const float angle = inv_freq[j] * static_cast<float>(position);
    const float c = static_cast<float>(std::cos(static_cast<double>(angle))) * table_.multiplier;
    const float s = static_cast<float>(std::sin(static_cast<double>(angle))) * table_.multiplier;
    if (table_.interleaved) {
      row[2 * j] = row[2 * j + 1] = c;
      row[2 * half + 2 * j] = -s;
      row[2 * half + 2 * j + 1] = s;
    } else {
      row[j] = c;
      row[half + j] = s;
    }
  }
}

void RopeTurns::grow(int64_t positions) {
  const int64_t have = static_cast<int64_t>(rows_.size()) / row_floats_;
  if (positions <= have) return;
  const int64_t want = std::max({positions, 2 * have, kFirstPositions});
  rows_.resize(want * row_floats_);
  for (int64_t p = have; p < want; ++p) fill(table_.inv_freq.data(), p, rows_.data() + p * row_floats_);
}

// theta' = theta * growth ^ (r / (r - 2)), growth = factor * length / M - (factor - 1), or Qwen's 2^ceil(log2(length / M) + 1) - 1
void RopeTurns::stretch(int64_t length) {
  if (length == stretched_length_) return;
  stretched_length_ = length;
  if (!table_.long_inv_freq.empty()) {
    stretched_freq_ = table_.long_inv_freq;
    return;
  }
  const double r = static_cast<double>(table_.rotary_dim), factor = table_.dynamic_factor;
  const double ratio = static_cast<double>(length) / static_cast<double>(table_.max_positions);
  const double growth = table_.stepped ? std::exp2(std::ceil(std::log2(ratio) + 1)) - 1 : factor * ratio - (factor - 1);
  const double theta = table_.theta * std::pow(growth, r / (r - 2));
  for (size_t j = 0; j < stretched_freq_.size(); ++j)
    stretched_freq_[j] = static_cast<float>(1 / std::pow(theta, 2 * static_cast<double>(j) / r));
}

void RopeTurns::prepare(const Step& step) {
  const std::span<const int32_t> positions = table_.by_block ? step.block_positions : step.positions;
  int64_t last = -1;
  for (const int32_t position : positions) {
    MAGA_CHECK(position >= 0 && position < kMaxPosition, "position ", position);
    last = std::max<int64_t>(last, position);
  }
  grow(last + 1);
  for (int64_t t = 0; t < step.tokens(); ++t) tokens_[t] = rows_.data() + positions[t] * row_floats_;
  if (!table_.by_length()) return;
  for (int64_t s = 0; s < step.sequences(); ++s)
    for (int64_t t = step.sequence_start[s]; t < step.sequence_start[s + 1]; ++t) {
      const int64_t prompt = step.prompt_length[s], length = table_.stepped ? prompt : std::max<int64_t>(prompt, positions[t] + 1);
      if (length <= table_.max_positions) continue;
      stretch(length);
      float* row = stretched_.data() + t * row_floats_;
      fill(stretched_freq_.data(), positions[t], row);
      tokens_[t] = row;
    }
}

}  // namespace maga::cpu
