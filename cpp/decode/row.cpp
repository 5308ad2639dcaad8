#include "decode/row.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace maga {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kLanes = 8;
constexpr int64_t kScanBlock = 1024;

// The largest of a block, and whether it holds a NaN (which no comparison with `largest` would show).
float block_max(Row block, bool* has_nan) {
  float largest[kLanes];
  int32_t nan[kLanes] = {};
  std::fill(largest, largest + kLanes, -kInfinity);
  size_t i = 0;
  for (; i + kLanes <= block.size(); i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) {
      const float x = block[i + lane];
      largest[lane] = x > largest[lane] ? x : largest[lane];
      nan[lane] |= x != x;
    }
  for (; i < block.size(); ++i) {
    largest[0] = std::max(largest[0], block[i]);
    nan[0] |= block[i] != block[i];
  }
  for (const int32_t lane : nan) *has_nan |= lane != 0;
  return *std::max_element(largest, largest + kLanes);
}

}  // namespace

RowScan scan(Row row) {
  RowScan result{.max = -kInfinity};
  bool has_nan = false;
  size_t best_block = 0;
  for (size_t begin = 0; begin < row.size(); begin += kScanBlock) {
    const float largest = block_max(row.subspan(begin, std::min<size_t>(kScanBlock, row.size() - begin)), &has_nan);
    if (largest > result.max) {
      result.max = largest;
      best_block = begin;
    }
  }
  const auto found = std::find(row.begin() + best_block, row.end(), result.max);
  result.argmax = found == row.end() ? 0 : static_cast<int32_t>(found - row.begin());
  result.finite = !has_nan && std::isfinite(result.max);
  return result;
}

float exp_negative(float x) {
  // exp(x) = 2^n * exp(r), r = x - n ln 2 in [-ln 2 / 2, ln 2 / 2], and a polynomial for exp(r) (Cephes expf).
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const float clamped = x < -87.0f ? -87.0f : x;
  const float shifted = clamped * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * r) * r + r + 1.0f;
  const int32_t exponent = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(kRound);
  const float value = p * std::bit_cast<float>((exponent + 127) << 23);
  return x < -87.0f ? 0.0f : value;
}

double exp_sum(Row row, float max, std::vector<double>* blocks) {
  double total = 0;
  if (blocks) blocks->clear();
  for (size_t begin = 0; begin < row.size(); begin += kSumBlock) {
    const Row block = row.subspan(begin, std::min<size_t>(kSumBlock, row.size() - begin));
    float sums[kLanes] = {};
    size_t i = 0;
    for (; i + kLanes <= block.size(); i += kLanes)
      for (int lane = 0; lane < kLanes; ++lane) sums[lane] += exp_negative(block[i + lane] - max);
    for (; i < block.size(); ++i) sums[0] += exp_negative(block[i] - max);
    double sum = 0;
    for (const float lane : sums) sum += lane;
    if (blocks) blocks->push_back(sum);
    total += sum;
  }
  return total;
}

void best_tokens(Row row, int64_t count, std::vector<Candidate>* best) {
  best->clear();
  if (count <= 0) return;
  // Collect what beats the worst of the best so far; whenever twice the wanted number has come together, keep the better half.
  const size_t wanted = static_cast<size_t>(count);
  float bar = -kInfinity;
  for (size_t i = 0; i < row.size(); ++i) {
    if (!(row[i] > bar)) continue;  // an equal logit has a higher id than those kept, so it loses
    best->push_back({static_cast<int32_t>(i), row[i]});
    if (best->size() < 2 * wanted) continue;
    std::nth_element(best->begin(), best->begin() + (wanted - 1), best->end());
    best->resize(wanted);
    bar = best->back().logit;
  }
  if (best->size() > wanted) {
    std::nth_element(best->begin(), best->begin() + (wanted - 1), best->end());
    best->resize(wanted);
  }
  std::sort(best->begin(), best->end());
}

}  // namespace maga
