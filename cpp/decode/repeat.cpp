// Both stages pass over the tokens once; DRY finds all its runs with the Z algorithm.
#include "decode/repeat.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

namespace maga {
namespace {

// z[k]: how many tokens from the end backwards equal those from the end less k backwards.
std::vector<size_t> common_suffixes(std::span<const int32_t> tokens) {
  const size_t n = tokens.size();
  const auto at = [&](size_t i) { return tokens[n - 1 - i]; };
  std::vector<size_t> z(n, 0);
  for (size_t k = 1, left = 0, right = 0; k < n; ++k) {
    if (k < right) z[k] = std::min(right - k, z[k - left]);
    while (k + z[k] < n && at(z[k]) == at(k + z[k])) ++z[k];
    if (k + z[k] > right) left = k, right = k + z[k];
  }
  return z;
}

}  // namespace

void no_repeat_ngram(MutableRow row, std::span<const int32_t> tokens, int size) {
  const size_t before = static_cast<size_t>(size) - 1;
  if (tokens.size() <= before) return;
  const auto last = tokens.last(before);
  for (size_t i = before; i < tokens.size(); ++i)
    if (std::equal(last.begin(), last.end(), tokens.begin() + (i - before)))
      row[tokens[i]] = -std::numeric_limits<float>::infinity();
}

void dry(MutableRow row, std::span<const int32_t> tokens, const Dry& settings) {
  if (settings.range > 0) tokens = tokens.last(std::min(tokens.size(), static_cast<size_t>(settings.range)));
  const auto breaks = [&](int32_t token) {
    return std::find(settings.breakers.begin(), settings.breakers.end(), token) != settings.breakers.end();
  };
  size_t unbroken = 0;  // tokens behind the last breaker
  while (unbroken < tokens.size() && !breaks(tokens[tokens.size() - 1 - unbroken])) ++unbroken;
  if (unbroken < static_cast<size_t>(settings.allowed_length)) return;

  const std::vector<size_t> common = common_suffixes(tokens);
  std::vector<std::pair<int32_t, size_t>> followers;  // and the length of the run before each
  for (size_t k = 1; k < tokens.size(); ++k) {
    const size_t length = std::min(common[k], unbroken);
    const int32_t follower = tokens[tokens.size() - k];
    if (length >= static_cast<size_t>(settings.allowed_length) && !breaks(follower)) followers.emplace_back(follower, length);
  }
  std::sort(followers.begin(), followers.end());
  for (size_t i = 0; i < followers.size(); ++i) {
    if (i + 1 < followers.size() && followers[i + 1].first == followers[i].first) continue;  // a longer run comes
    const double penalty = settings.multiplier * std::pow(settings.base, followers[i].second - settings.allowed_length);
    row[followers[i].first] -= static_cast<float>(std::min<double>(penalty, std::numeric_limits<float>::max()));
  }
}

}  // namespace maga
