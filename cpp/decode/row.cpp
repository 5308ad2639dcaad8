// 4-lane passes over a row: its maximum, its sum of exponentials, its best tokens.
#include "decode/row.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace maga {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The compiler does not vectorise loops whose comparisons may meet a NaN, so the passes say it themselves: 4 lanes are what every
// x86-64 and AArch64 machine has.
using Floats = float __attribute__((vector_size(16)));
using Ints = int32_t __attribute__((vector_size(16)));
constexpr size_t kLanes = 4;
constexpr size_t kUnroll = 4;  // independent accumulators, to hide the latency of an addition
constexpr size_t kStride = kLanes * kUnroll;

Floats load(const float* from) {
  Floats lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}

constexpr float kExpLowest = -87.0f;  // below it exp(x) would be subnormal

// exp(x) = 2^n * exp(r) with r = x - n ln 2 in [-ln 2 / 2, ln 2 / 2], and a polynomial for exp(r) (Cephes, expf).
template <typename Float, typename Int>
Float exp_of(Float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const Float lowest = Float{} + kExpLowest;
  const Float clamped = x < lowest ? lowest : x;
  const Float shifted = clamped * 1.44269504f + kRound;
  const Float n = shifted - kRound;
  const Float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  Float p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * r) * r + r + 1.0f;
  const Int exponent = std::bit_cast<Int>(shifted) - std::bit_cast<int32_t>(kRound);
  const Float value = p * std::bit_cast<Float>((exponent + 127) << 23);
  return x < lowest ? Float{} : value;
}

// The largest of a block, and whether it holds a NaN (which no comparison with the largest would show).
float block_max(Row block, bool* has_nan) {
  Floats largest[kUnroll];
  Ints nan[kUnroll] = {};
  std::fill(largest, largest + kUnroll, Floats{} - kInfinity);
  size_t i = 0;
  for (; i + kStride <= block.size(); i += kStride)
    for (size_t u = 0; u < kUnroll; ++u) {
      const Floats x = load(&block[i + u * kLanes]);
      largest[u] = x > largest[u] ? x : largest[u];
      nan[u] |= x != x;
    }
  float result = -kInfinity;
  for (size_t u = 0; u < kUnroll; ++u)
    for (size_t lane = 0; lane < kLanes; ++lane) {
      result = std::max(result, largest[u][lane]);
      *has_nan |= nan[u][lane] != 0;
    }
  for (; i < block.size(); ++i) {
    result = std::max(result, block[i]);
    *has_nan |= block[i] != block[i];
  }
  return result;
}

double block_exp_sum(Row block, float max) {
  Floats sums[kUnroll] = {};
  size_t i = 0;
  for (; i + kStride <= block.size(); i += kStride)
    for (size_t u = 0; u < kUnroll; ++u) sums[u] += exp_of<Floats, Ints>(load(&block[i + u * kLanes]) - max);
  double result = 0;
  for (const Floats& sum : sums)
    for (size_t lane = 0; lane < kLanes; ++lane) result += sum[lane];
  for (; i < block.size(); ++i) result += exp_of<float, int32_t>(block[i] - max);
  return result;
}

// Calls visit(index) for every logit of the row that is at least `bar` when its block is reached; passes over the others in blocks.
template <typename Visit>
void visit_from(Row row, const float& bar, Visit visit) {
  constexpr size_t kBlock = 8 * kStride;
  bool has_nan = false;
  for (size_t begin = 0; begin < row.size(); begin += kBlock) {
    const Row block = row.subspan(begin, std::min(kBlock, row.size() - begin));
    if (block_max(block, &has_nan) < bar) continue;
    for (size_t i = 0; i < block.size(); ++i)
      if (block[i] >= bar) visit(begin + i);
  }
}

}  // namespace

RowScan scan(Row row) {
  constexpr size_t kBlock = 1024;
  RowScan result{.max = -kInfinity};
  bool has_nan = false;
  size_t best_block = 0;
  for (size_t begin = 0; begin < row.size(); begin += kBlock) {
    const float largest = block_max(row.subspan(begin, std::min(kBlock, row.size() - begin)), &has_nan);
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

float exp_negative(float x) { return exp_of<float, int32_t>(x); }

int32_t rank(Row row, int32_t token) {
  const float own = row[token];
  int32_t larger = 0;
  for (const float logit : row) larger += logit > own;
  return 1 + larger;
}

double exp_sum(Row row, float max, std::vector<double>* blocks) {
  double total = 0;
  if (blocks) blocks->clear();
  for (size_t begin = 0; begin < row.size(); begin += kSumBlock) {
    const double sum = block_exp_sum(row.subspan(begin, std::min<size_t>(kSumBlock, row.size() - begin)), max);
    if (blocks) blocks->push_back(sum);
    total += sum;
  }
  return total;
}

void tokens_from(Row row, float bar, std::vector<Candidate>* tokens) {
  tokens->clear();
  visit_from(row, bar, [&](size_t i) { tokens->push_back({static_cast<int32_t>(i), row[i]}); });
}

void best_tokens(Row row, int64_t count, std::vector<Candidate>* best) {
  best->clear();
  if (count <= 0) return;
  // Collect what beats the worst of the best so far; whenever twice the wanted number has come together, keep the better half.
  const size_t wanted = static_cast<size_t>(count);
  float bar = std::numeric_limits<float>::lowest();
  visit_from(row, bar, [&](size_t i) {
    if (best->size() >= wanted && row[i] == bar) return;  // those kept have the same logit and a lower id
    best->push_back({static_cast<int32_t>(i), row[i]});
    if (best->size() < 2 * wanted) return;
    std::nth_element(best->begin(), best->begin() + (wanted - 1), best->end());
    best->resize(wanted);
    bar = best->back().logit;
  });
  if (best->size() > wanted) {
    std::nth_element(best->begin(), best->begin() + (wanted - 1), best->end());
    best->resize(wanted);
  }
  std::sort(best->begin(), best->end());
}

}  // namespace maga
