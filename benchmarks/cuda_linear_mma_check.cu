// Checks linear_mma, which needs no Hopper, on whatever card there is: every form, tile and epilogue, odd sizes and strides, and
// mixtures of experts, against sums in double precision over the same numbers.
#include <numeric>
#include <random>

#include "backends/cuda/linear_mma.h"
#include "cuda_linear_coded_checker.cuh"

namespace maga::bench {
namespace {

using Shift = cuda::AffineShift;

constexpr ActivationKind kActivations[] = {ActivationKind::silu, ActivationKind::gelu, ActivationKind::gelu_tanh,
                                           ActivationKind::relu};

const CodeForm kForms[] = {{4, 128},
                           {4, 32},
                           {4, 96},
                           {4, 0},
                           {3, 32},
                           {4, 64, Shift::zeros},
                           {4, 128, Shift::zeros},
                           {4, 32, Shift::offsets},
                           {8, 0},
                           {8, 128},
                           {8, 32},
                           {8, 64, Shift::offsets},
                           {5, 32, Shift::zeros},
                           {8, 0, Shift::none, true}};

struct Sizes {
  int n, k;
};
// Those that groups of a form allow: rows and columns that leave units, tiles and ring steps part empty.
std::vector<Sizes> sizes_of(const CodeForm& form) {
  if (form.group == 0) return {{600, 1096}, {37, 77}, {129, 8}, {7, 1025}};
  if (form.group == 128) return {{600, 1152}, {37, 128}, {9, 640}};
  return {{600, 11 * form.group}, {37, form.group}, {129, 31 * form.group}};
}

class MmaChecker {
 public:
  MmaChecker(cudaStream_t stream, bool small) : coded_(stream), small_(small), stream_(stream) {}

  int run() {
    for (const CodeForm& form : kForms) {
      coded_.take(form);
      const bool main_form = &form == kForms || form.e4m3 || form.bits == 8;
      for (const DType type : {DType::bf16, DType::f16}) {
        for (const int m : {1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 100, 128, 129, 256, 300}) {
          if (small_ ? m != 9 && m != 65 : !main_form && m != 1 && m != 9 && m != 33 && m != 100 && m != 300) continue;
          epilogues(type, m);
          configs(type, m);
        }
        experts(type);
      }
    }
    std::printf("%d weights wrong, %d of %d experts' linears wrong; ", coded_.wrong, wrong_, experts_);
    return coded_.checker.report() + coded_.wrong + wrong_;
  }

 private:
  // As the kernels are compiled for.
  cuda::MmaShape shape_of(const Case& c) const {
    const CodeForm& form = coded_.form;
    cuda::MmaShape shape{.m = c.m, .rows = c.gated ? 2 * c.n : c.n, .k = c.k, .may_split = c.slabs};
    shape.layout = {.bits = form.e4m3 ? cuda::kE4m3 : form.bits <= 4 ? 4 : 8, .sets = 1, .shift = form.shift};
    for (const int64_t group = form.group && !form.e4m3 ? form.group : 128; group % (128 / shape.layout.sets) != 0;)
      shape.layout.sets *= 2;
    return shape;
  }
  Configured configured(const cuda::MmaConfig& config) {
    return {config.split, [this, config](const LinearArgs& args) { mmas_.run({stream_, false}, args, config); },
            concat("tile ", config.tile.tokens, " x ", config.tile.tiles, ", deep ", config.deep, ", split ", config.split,
                   ", ctas ", config.ctas, ", stages ", config.stages)};
  }
  // As chosen and, of e4m3, through Linears, which has no other kernel for it.
  void check(const Case& c) {
    const cuda::MmaConfig config = cuda::choose_mma(shape_of(c), mmas_.card());
    if (!c.slabs || config.split > 1) coded_.checker.check(c, configured(config));
    if (coded_.form.e4m3) coded_.checker.check(c);
  }

  void epilogues(DType type, int m) {
    for (const auto [n, k] : sizes_of(coded_.form)) {
      auto with = [&](auto&& change) {
        Case c{.type = type, .m = m, .n = n, .k = k};
        change(c);
        if (c.gated) c.n = (c.n + 7) / 8 * 8;
        check(c);
      };
      with([](Case&) {});
      with([](Case& c) { c.bias = true, c.residual = Case::in_place; });
      with([](Case& c) { c.out_f32 = true, c.out_pad = 3; });
      with([](Case& c) { c.out_f32 = true, c.bias = true, c.residual = Case::apart; });
      with([](Case& c) { c.slabs = true; });
      with([](Case& c) { c.x_shift = 16, c.x_pad = 64 - c.k % 8, c.out_shift = 8, c.out_pad = 8; });
      with([](Case& c) { c.x_shift = 1, c.x_pad = 3, c.out_shift = 3, c.out_pad = 5, c.residual = Case::in_place; });
      for (const ActivationKind kind : kActivations)
        with([&](Case& c) { c.gated = true, c.activation = kind, c.bias = kind != ActivationKind::relu, c.out_pad = 3; });
    }
  }

  // Few SMs, so that a CTA has several tiles; rings of every length.
  void configs(DType type, int m) {
    const int k = sizes_of(coded_.form)[0].k;
    const auto all = [&](const Case& c, int sms) {
      cuda::MmaCard card = mmas_.card();
      card.sms = sms;
      for (cuda::MmaConfig config : cuda::mma_configs(shape_of(c), card)) {
        if (c.slabs != (config.split > 1)) continue;
        coded_.checker.check(c, configured(config));
        if (config.stages == 2) continue;
        config.stages = 2;
        coded_.checker.check(c, configured(config));
      }
    };
    all({.type = type, .m = m, .n = 600, .k = k, .bias = true}, 3);
    all({.type = type, .m = m, .n = 600, .k = k, .slabs = true}, 5);
    all({.type = type, .m = m, .n = 344, .k = k, .bias = true, .gated = true}, 2);
  }

  void experts(DType type);
  void expert_linear(DType type, int experts, const std::vector<int32_t>& counts, int n, int k, const Gating* gating);

  CodedChecker coded_;
  cuda::Mmas mmas_;
  bool small_;
  cudaStream_t stream_;
  int experts_ = 0, wrong_ = 0;
  DeviceBuffer x_{8 << 20}, out_{16 << 20}, bias_{1 << 20}, sums_{64 << 20}, counts_{4096}, verdict_{sizeof(Verdict)};
};

__device__ double gated(const Gating& g, double gate, double up) {
  if (g.limit > 0) gate = fmin(gate, double(g.limit)), up = fmax(fmin(up, double(g.limit)), -double(g.limit));
  const double active = g.kind == ActivationKind::silu ? gate / (1 + exp(-g.alpha * gate)) : activate(g.kind, gate);
  return active * (up + g.up_offset);
}

// Of the tokens of one expert: `sums` (m, rows), its own bias.
__global__ void compare_expert(DType type, const double* sums, const void* bias, int n, bool has_gate, Gating gating,
                               const void* out, Verdict* verdict) {
  const int column = blockIdx.x * kCheckThreads + threadIdx.x, token = blockIdx.y, rows = has_gate ? 2 * n : n;
  if (column >= n) return;
  auto full = [&](int row) { return sums[int64_t{token} * rows + row] + (bias ? value_at(type, bias, row) : 0); };
  const double right = has_gate ? gated(gating, full(column), full(n + column)) : full(column);
  const double error = abs(value_at(type, out, int64_t{token} * n + column) - right) / (1 + abs(right));
  atomicMax(reinterpret_cast<int*>(&verdict->worst), __float_as_int(error == error ? static_cast<float>(error) : 1e9f));
}

void MmaChecker::expert_linear(DType type, int experts, const std::vector<int32_t>& counts, int n, int k, const Gating* gating) {
  const bool has_gate = gating != nullptr, biased = n % 16 != 0;
  const int rows = has_gate ? 2 * n : n, slots = std::accumulate(counts.begin(), counts.end(), 0);
  const int64_t size = size_of(type), used = int64_t{slots} * n * size, margin = 4096;
  const std::string name = concat(name_of(type), coded_.checker.about, ", ", experts, " experts, ", slots, " slots, n ", n, " k ",
                                  k, has_gate ? ", gated" : "", biased ? ", bias" : "");
  const uint32_t seed = 1000 + ++experts_;
  MAGA_CHECK(used + 2 * margin <= static_cast<int64_t>(out_.bytes()) && slots * k * size <= static_cast<int64_t>(x_.bytes()), name);
  coded_.make(stream_, type, int64_t{experts} * rows, k, seed, name);
  fill(type, x_.at(), int64_t{slots} * k, 1.7f, seed + 1);
  fill(type, bias_.at(), int64_t{experts} * rows, 1.f, seed + 2);
  MAGA_CUDA(cudaMemsetAsync(out_.at(), kPoison, used + 2 * margin, stream_));
  MAGA_CUDA(cudaMemsetAsync(verdict_.at(), 0, sizeof(Verdict), stream_));
  MAGA_CUDA(cudaMemcpyAsync(counts_.at(), counts.data(), counts.size() * 4, cudaMemcpyHostToDevice, stream_));
  cuda::MoeGemm gemm(type);
  gemm.run({stream_, false}, {.counts = static_cast<const int32_t*>(counts_.at()),
                              .experts = experts,
                              .top_k = 1,
                              .tokens = slots,
                              .x = x_.at(),
                              .out = out_.at(margin),
                              .weight = coded_.coded.units(),
                              .layout = coded_.coded.layout(),
                              .bias = biased ? bias_.at() : nullptr,
                              .n = n,
                              .k = k,
                              .gated = has_gate,
                              .gating = has_gate ? *gating : Gating{}});
  auto* const verdict = static_cast<Verdict*>(verdict_.at());
  auto* const sums = static_cast<double*>(sums_.at());
  for (int expert = 0, slot = 0; expert < experts; slot += counts[expert++]) {
    if (counts[expert] == 0) continue;
    MAGA_CHECK(int64_t{counts[expert]} * rows * 8 <= static_cast<int64_t>(sums_.bytes()), name);
    const auto blocks = [&](int columns) { return dim3((columns + kCheckThreads - 1) / kCheckThreads, counts[expert]); };
    reference<<<blocks(rows), kCheckThreads, 0, stream_>>>(
        {type, x_.at(int64_t{slot} * k * size), k}, {type, coded_.dense.at(int64_t{expert} * rows * k * size), k}, rows, k, sums);
    compare_expert<<<blocks(n), kCheckThreads, 0, stream_>>>(type, sums, biased ? bias_.at(int64_t{expert} * rows * size) : nullptr,
                                                             n, has_gate, has_gate ? *gating : Gating{},
                                                             out_.at(margin + int64_t{slot} * n * size), verdict);
  }
  stray<<<256, kCheckThreads, 0, stream_>>>(static_cast<uint8_t*>(out_.at()), used + 2 * margin, margin, std::max<int64_t>(used, 1),
                                            1, used, &verdict->strays);
  MAGA_CUDA(cudaGetLastError());
  Verdict found;
  MAGA_CUDA(cudaMemcpyAsync(&found, verdict, sizeof found, cudaMemcpyDeviceToHost, stream_));
  MAGA_CUDA(cudaStreamSynchronize(stream_));
  const float limit = coded_.checker.limits({.type = type, .m = slots, .n = n, .k = k, .gated = has_gate}, true).worst *
                      (has_gate && gating->limit > 0 ? 2.f : 1.f);
  if (found.worst <= limit && found.strays == 0) return;
  if (++wrong_ <= 20) std::printf("WRONG %s: error %g, limit %g, %d stray bytes\n", name.c_str(), found.worst, limit, found.strays);
}

void MmaChecker::experts(DType type) {
  const Gating gatings[] = {{}, {.alpha = 1.702f, .limit = 7, .up_offset = 1}, {.kind = ActivationKind::gelu}};
  std::mt19937 random(5);
  const int k = sizes_of(coded_.form)[0].k;
  for (const int experts : {5, 40})
    for (const int slots : {1, 3, 16, 61, 300, 1000}) {
      if (small_ && slots != 61) continue;
      // Few experts take most of them, and some none.
      std::vector<int32_t> counts(experts);
      for (int i = 0; i < slots; ++i) ++counts[random() % (random() % 3 == 0 ? experts : experts / 3)];
      for (const Gating& gating : gatings) expert_linear(type, experts, counts, 88, k, &gating);
      expert_linear(type, experts, counts, 208, k, nullptr);
      expert_linear(type, experts, counts, 136, k, nullptr);
    }
}

}  // namespace

int check_mma(cudaStream_t stream, bool small) { return MmaChecker(stream, small).run(); }

}  // namespace maga::bench
