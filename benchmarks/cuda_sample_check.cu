// The sampler against a sort in double precision: the tokens kept, every single draw, and their frequencies.
#include <numeric>

#include "cuda_rows.h"

namespace maga::bench {

using namespace cuda;

namespace {

using Row = std::vector<float>;

std::vector<Drawn> run(const std::vector<Row>& rows, const std::vector<Draw>& draws) {
  const int vocab = static_cast<int>(rows[0].size()), count = static_cast<int>(draws.size());
  Row all;
  for (const Row& row : rows) all.insert(all.end(), row.begin(), row.end());
  const Buffer logits(all), d(draws), scratch(sample_scratch_bytes(count)), chosen(count * 4), result(count * sizeof(Drawn));
  for (const Buffer* out : {&scratch, &chosen, &result}) MAGA_CUDA(cudaMemset(out->get(), kPoison, out->bytes()));
  sample({}, {.logits = logits.get<float>(),
              .vocab = vocab,
              .draws = d.get<Draw>(),
              .count = count,
              .chosen = chosen.get<int32_t>(),
              .result = result.get<Drawn>(),
              .scratch = scratch.get()});
  std::vector<Drawn> drawn = result.download<Drawn>();
  const std::vector<int32_t> tokens = chosen.download<int32_t>();
  for (int i = 0; i < count; ++i)
    if (drawn[i].token != tokens[i]) drawn[i].finite = -1;  // no value that a kernel writes
  return drawn;
}

// Which tokens are kept, by plain definition: exactly, and with top_p and the bar of min_p a little higher and lower.
struct KeptTokens {
  std::vector<bool> exact, most, least;
};

KeptTokens kept_tokens(const Row& row, const Draw& d) {
  const float max = *std::max_element(row.begin(), row.end()), scale = 1 / d.temperature;
  std::vector<float> s(row.size());
  for (size_t i = 0; i < row.size(); ++i) s[i] = (row[i] - max) * scale;
  std::vector<int> order(row.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return s[a] > s[b]; });
  if (d.top_k > 0 && d.top_k < static_cast<int>(order.size())) order.resize(d.top_k);
  double total = 0;
  for (const int id : order) total += std::exp(static_cast<double>(s[id]));
  auto keep = [&](double nudge) {
    std::vector<bool> kept(row.size());
    double sum = 0;
    for (const int id : order) {
      if (d.top_p < 1 && sum >= (d.top_p + nudge) * total) break;
      sum += std::exp(static_cast<double>(s[id]));
      if (d.min_p == 0 || s[id] >= std::log(static_cast<double>(d.min_p)) - nudge) kept[id] = true;
    }
    return kept;
  };
  return {keep(0), keep(2e-6), keep(-2e-6)};
}

// Draws at many indices from one row: each token must be the one that inversion gives, unless u lies on a boundary.
void check_draws(Report& report, const std::string& name, const Row& row, Draw d, int count) {
  std::vector<Draw> draws(count, d);
  for (int i = 0; i < count; ++i) draws[i].index = i;
  const std::vector<Drawn> drawn = run({row}, draws);
  const auto [kept, most, least] = kept_tokens(row, d);
  const double max = *std::max_element(row.begin(), row.end()), scale = 1 / d.temperature;
  std::vector<double> through(row.size());
  double total = 0, unsure = 0;
  for (size_t i = 0; i < row.size(); ++i) {
    const double weight = std::exp((row[i] - max) * scale);
    if (most[i] != least[i]) unsure += weight;
    if (kept[i]) total += weight;
    through[i] = total;
  }
  // Frequencies, with tokens of little expectation together.
  std::vector<int> seen(row.size());
  int64_t wrong = 0;
  for (int i = 0; i < count; ++i) {
    const int token = drawn[i].token;
    if (drawn[i].finite != 1 || token < 0 || token >= static_cast<int>(row.size()) || !most[token]) {
      ++wrong;
      continue;
    }
    ++seen[token];
    const double u = uniform(d.seed, d.stream, i) * total, slack = 5e-6 * total + unsure;
    const double before = token == 0 ? 0 : through[token - 1];
    wrong += u < before - slack || u > through[token] + slack;
  }
  double chi = 0, pool = 0, pool_seen = 0;
  int freedom = -1;
  for (size_t i = 0; i < row.size(); ++i) {
    pool += (kept[i] ? through[i] - (i ? through[i - 1] : 0) : 0) / total * count;
    pool_seen += seen[i];
    if (pool < 8) continue;
    chi += (pool_seen - pool) * (pool_seen - pool) / pool;
    ++freedom;
    pool = pool_seen = 0;
  }
  const bool likely = freedom < 1 || chi < freedom + 5 * std::sqrt(2.0 * freedom) + 10;
  const int64_t size = std::count(kept.begin(), kept.end(), true);
  report.expect(wrong == 0 && likely, concat(name, ": keeps ", size, ", ", wrong, " of ", count, " draws wrong, chi-square ", chi,
                                             " for ", freedom, ", unsure ", unsure / total));
}

Row gaussian_row(Random& random, int vocab, double sigma, double step) {
  Row row(vocab);
  for (float& x : row) {
    x = random.gaussian(sigma);
    if (step > 0) x = static_cast<float>(std::round(x / step) * step);  // many ties
  }
  return row;
}

void check_greedy(Report& report, Random& random, int vocab) {
  std::vector<Row> rows;
  std::vector<Draw> draws;
  std::vector<Drawn> expected;
  constexpr float kInfinity = INFINITY;
  for (int kind = 0; kind < 12; ++kind) {
    Row row = gaussian_row(random, vocab, 3, kind % 2 ? 1.0 : 0);
    const int at = random.below(vocab);
    if (kind == 2) row.assign(vocab, -kInfinity), row[at] = -5;
    if (kind == 3) row.assign(vocab, 2.5f);
    if (kind == 4) row[at] = NAN;
    if (kind == 5) row[at] = kInfinity;
    if (kind == 6) row.assign(vocab, -kInfinity);
    if (kind == 7) row[vocab - 1] = 100;
    if (kind == 8) row[0] = 100;
    if (kind == 9) row[at] = -kInfinity;
    if (kind == 10)
      for (float& x : row) x -= 1e30f;
    const bool finite = kind != 4 && kind != 5 && kind != 6 && !(kind == 9 && vocab == 1);
    const int best = static_cast<int>(std::max_element(row.begin(), row.end()) - row.begin());
    rows.push_back(row);
    for (const bool random_draw : {false, true}) {
      Draw d{.row = kind, .temperature = random_draw ? 1.f : 0.f, .seed = 5};
      if (random_draw) d.top_k = 1;
      if (kind == 4 && random_draw) d.top_k = 0, d.top_p = 0.5f;
      draws.push_back(d);
      expected.push_back(finite ? Drawn{best, 1} : Drawn{0, 0});
    }
    draws.push_back({.row = -1});
    expected.push_back({0, 1});
  }
  const std::vector<Drawn> got = run(rows, draws);
  for (size_t i = 0; i < got.size(); ++i)
    report.expect(got[i].token == expected[i].token && got[i].finite == expected[i].finite,
                  concat("greedy vocab ", vocab, " draw ", i, ": ", got[i].token, " not ", expected[i].token));
}

// The same draw alone and among others.
void check_batch(Report& report, Random& random, int vocab) {
  std::vector<Row> rows;
  std::vector<Draw> draws;
  for (int r = 0; r < 9; ++r) {
    rows.push_back(gaussian_row(random, vocab, 1 + r / 2.0, r % 2 ? 0.25 : 0));
    draws.push_back({.row = r,
                     .temperature = 0.4f + 0.2f * r,
                     .top_k = r % 3 == 0 ? 40 : 0,
                     .top_p = r % 2 ? 0.9f : 1.f,
                     .min_p = r == 4 ? 0.05f : 0.f,
                     .seed = 77,
                     .stream = uint64_t(r) << 33,
                     .index = uint64_t(r) * 1000});
  }
  const std::vector<Drawn> together = run(rows, draws);
  for (int r = 0; r < 9; ++r) {
    Draw alone = draws[r];
    alone.row = 0;
    report.expect(run({rows[r]}, {alone})[0].token == together[r].token, concat("batch of vocab ", vocab, " row ", r));
  }
}

}  // namespace

void check_sample(Report& report, bool small) {
  Random random(11);
  const std::vector<int> vocabs = small ? std::vector<int>{5, 5000} : std::vector<int>{1, 5, 1000, 50257, 128256, 300001, 400000};
  for (const int vocab : vocabs) {
    check_greedy(report, random, vocab);
    check_batch(report, random, vocab);
    const int count = small ? 8 : vocab < 10000 ? 20000 : 400;
    for (const double sigma : {0.3, 1.5, 4.0})
      for (const double step : {0.0, 0.5, 100.0}) {
        if ((small && step == 0.5) || (vocab > 200000 && sigma != 1.5)) continue;
        const Row row = gaussian_row(random, vocab, sigma, step);
        for (const Draw& d : {Draw{.temperature = 1}, Draw{.temperature = 0.7f, .top_k = 50}, Draw{.temperature = 1, .top_p = 0.9f},
                              Draw{.temperature = 1.3f, .top_k = 700, .top_p = 0.8f}, Draw{.temperature = 1, .min_p = 0.1f},
                              Draw{.temperature = 1, .top_k = 20000, .top_p = 0.99f, .min_p = 0.02f},
                              Draw{.temperature = 0.5f, .top_p = 0.3f, .min_p = 0.3f}, Draw{.temperature = 1e-30f}}) {
          Draw draw = d;
          draw.seed = random.below(1 << 30);
          draw.stream = 1;
          check_draws(report,
                      concat("vocab ", vocab, " sigma ", sigma, " step ", step, " temperature ", d.temperature, " top_k ", d.top_k,
                             " top_p ", d.top_p, " min_p ", d.min_p),
                      row, draw, count);
        }
      }
  }
}

}  // namespace maga::bench
