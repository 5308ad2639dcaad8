// Checks the CPU's matrix kernels, then times them on the matrices of a 135M model: cpu_linear [check|time] [isa] [threads]
// [weight] [tokens...].
#include "cpu_linear.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

namespace maga::bench {
namespace {

struct Matrix {
  const char* name;
  int64_t rows, cols;
  bool gated;
};
constexpr Matrix kLayer[] = {
    {"qkv", 960, 576, false}, {"o", 576, 576, false}, {"gate_up", 3072, 576, true}, {"down", 576, 1536, false}};
constexpr Matrix kHead = {"head", 49152, 576, false};
constexpr int kLayers = 30;

using Packed = std::shared_ptr<const cpu::PackedWeight>;

Packed pack(const WeightCase& c, const Matrix& m, uint64_t seed) {
  Random random{seed};
  return cpu::pack_matrix({.name = m.name, .sources = {}, .shape = {m.rows, m.cols}}, make_weight(c, m.rows, m.cols, random));
}

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Timing {
  cpu::Isa isa;
  ThreadPool& threads;
  std::vector<float> x, out;
  std::vector<std::byte> scratch;

  Timing(cpu::Isa isa, ThreadPool& threads, int64_t tokens) : isa(isa), threads(threads) {
    Random random{7};
    x.resize(static_cast<size_t>(tokens * 1536));
    for (float& v : x) v = static_cast<float>(random.between(-1, 1));
    out.resize(static_cast<size_t>(tokens * 49152));
    scratch.resize(static_cast<size_t>(cpu::linear_scratch_bytes(tokens, 1536)) + 64);
  }

  void run(const Matrix& m, const Packed& w, int64_t tokens, bool quantize) {
    cpu::LinearCall call{.weight = w.get(), .x = x.data(), .x_stride = m.cols, .tokens = tokens, .out = out.data()};
    call.out_stride = m.gated ? m.rows / 2 : m.rows;
    call.gated = m.gated;
    call.quantize_activations = quantize;
    cpu::linear(threads, isa, scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64), call);
  }

  // The shortest of a few rounds: other load only ever adds.
  template <typename Body>
  double best(int rounds, Body&& body) {
    double shortest = 1e9;
    for (int i = 0; i < rounds; ++i) {
      const double start = seconds();
      body();
      shortest = std::min(shortest, seconds() - start);
    }
    return shortest;
  }
};

void time_model(cpu::Isa isa, ThreadPool& threads, const WeightCase& weight, bool quantize, const std::vector<int64_t>& batches) {
  std::vector<std::vector<Packed>> layers;
  int64_t bytes = 0, products = 0;
  for (int i = 0; i < kLayers; ++i) {
    auto& layer = layers.emplace_back();
    for (const Matrix& m : kLayer) {
      layer.push_back(pack(weight, m, static_cast<uint64_t>(i)));
      bytes += layer.back()->bytes();
      products += m.rows * m.cols;
    }
  }
  const Packed head = pack(weight, kHead, 99);
  const std::string title = weight.name + (quantize ? ", quantized" : ", exact");
  std::printf("\n%s, %s, %d threads: %.1f MB in layers, %.1f MB head\n", std::string(cpu::name_of(isa)).c_str(), title.c_str(),
              threads.size(), static_cast<double>(bytes) / 1e6, static_cast<double>(head->bytes()) / 1e6);
  std::printf("%7s %9s %9s | %s\n", "tokens", "tok/s", "GMAC/s", "GMAC/s of each matrix (GB/s for one token)");
  for (const int64_t tokens : batches) {
    Timing timing(isa, threads, tokens);
    // All layers in turn, as in a step, so that weights come from where they come from then; the head for at most 32 tokens.
    const int64_t head_tokens = std::min<int64_t>(tokens, 32);
    const int rounds = tokens > 64 ? 3 : 8;
    std::string columns;
    double total = 0;
    for (size_t i = 0; i <= std::size(kLayer); ++i) {
      const bool is_head = i == std::size(kLayer);
      const Matrix& m = is_head ? kHead : kLayer[i];
      const double time = timing.best(rounds, [&] {
        if (is_head)
          timing.run(m, head, head_tokens, quantize);
        else
          for (const auto& layer : layers) timing.run(m, layer[i], tokens, quantize);
      });
      const double count = is_head ? 1 : kLayers;
      const double rate = static_cast<double>((is_head ? head_tokens : tokens) * m.rows * m.cols) * count / time / 1e9;
      const double read = static_cast<double>(is_head ? head->bytes() : layers[0][i]->bytes()) * count / time / 1e9;
      char text[64];
      std::snprintf(text, sizeof text, tokens == 1 ? "  %s %.0f (%.1f)" : "  %s %.0f", m.name, rate, read);
      columns += text;
    }
    total = timing.best(rounds, [&] {
      for (const auto& layer : layers)
        for (size_t i = 0; i < std::size(kLayer); ++i) timing.run(kLayer[i], layer[i], tokens, quantize);
      if (tokens <= 32) timing.run(kHead, head, tokens, quantize);
    });
    const int64_t all = products + (tokens <= 32 ? kHead.rows * kHead.cols : 0);
    std::printf("%7ld %9.0f %9.1f |%s\n", static_cast<long>(tokens), static_cast<double>(tokens) / total,
                static_cast<double>(tokens * all) / total / 1e9, columns.c_str());
  }
}

}  // namespace
}  // namespace maga::bench

int main(int argc, char** argv) {
  using namespace maga;
  using namespace maga::bench;
  const std::string what = argc > 1 ? argv[1] : "all";
  try {
    const std::vector<cpu::Isa> isas = argc > 2 ? std::vector{cpu::parse_isa(argv[2])} : cpu::usable_isas();
    const std::string only = argc > 4 ? argv[4] : "";
    bool right = true;
    if (what != "time")
      for (const cpu::Isa isa : isas) right &= check_linear(isa, what == "check" ? only : "");
    if (what == "check") return right ? 0 : 1;
    ThreadPool threads(argc > 3 ? std::atoi(argv[3]) : 0);
    std::vector<int64_t> batches;
    for (int i = 5; i < argc; ++i) batches.push_back(std::max(1, std::atoi(argv[i])));
    if (batches.empty()) batches = {1, 2, 4, 8, 16, 32, 64, 512};
    const WeightCase weights[] = {{.name = "q4_1", .bits = 4, .group = 32, .offset = true},
                                  {.name = "q8_0", .bits = 8, .group = 32, .zero = 128},
                                  {.name = "bf16", .dtype = DType::bf16}};
    for (const cpu::Isa isa : isas)
      for (const WeightCase& weight : weights)
        for (const bool quantize : {true, false})
          if ((weight.bits || !quantize) && (only.empty() || only == weight.name + (quantize ? "" : "_exact")))
            time_model(isa, threads, weight, quantize, batches);
    return right ? 0 : 1;
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
