// Every weight form, shape and batch size against plain loops in double precision, and bit for bit against itself in other batches.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <limits>

#include "cpu_linear.h"

namespace maga::bench {
namespace {

using cpu::LinearCall;

const WeightCase kWeights[] = {
    {.name = "fp32"},
    {.name = "fp16", .dtype = DType::f16},
    {.name = "bf16", .dtype = DType::bf16},
    {.name = "q2 g16", .bits = 2, .group = 16, .offset = true, .half_scales = false},
    {.name = "q3 g16", .bits = 3, .group = 16, .zero = 4, .half_scales = false},
    {.name = "q4 g32 zero 8", .bits = 4, .group = 32, .zero = 8},
    {.name = "q4 g32 offset", .bits = 4, .group = 32, .offset = true},
    {.name = "q4 g32 offset, fp32 scales", .bits = 4, .group = 32, .offset = true, .half_scales = false},
    {.name = "q4 g48", .bits = 4, .group = 48, .zero = 7, .offset = true},
    {.name = "q4 g64", .bits = 4, .group = 64, .zero = 8},
    {.name = "q4 g128", .bits = 4, .group = 128, .offset = true},
    {.name = "q4 row", .bits = 4, .zero = 8},
    {.name = "q4 g8, widened", .bits = 4, .group = 8, .zero = 8, .offset = true},
    {.name = "q5 g32", .bits = 5, .group = 32, .offset = true},
    {.name = "q6 g16", .bits = 6, .group = 16, .zero = 32, .half_scales = false},
    {.name = "q8 g32 zero 128", .bits = 8, .group = 32, .zero = 128},
    {.name = "q8 g128 offset", .bits = 8, .group = 128, .zero = 3, .offset = true},
    {.name = "q8 row", .bits = 8, .zero = 128},
    {.name = "q8 row offset", .bits = 8, .offset = true, .half_scales = false},
};

struct Shape {
  int64_t rows, cols;
};
// Rows and columns that fill neither a panel nor a unit, and one matrix of several chunks.
const Shape kShapes[] = {{1, 1}, {5, 16}, {16, 32}, {37, 100}, {48, 96}, {74, 384}, {80, 640}, {130, 77}, {96, 1152}};
const int64_t kTokens[] = {1, 2, 3, 5, 6, 7, 8, 9, 13, 16, 17, 25, 33, 70, 100};
constexpr int64_t kMostTokens = 100;

struct Activations {
  int64_t stride = 0;
  std::vector<float> x;        // (tokens, cols) as given
  std::vector<float> rounded;  // the same after rounding to int8 per block
};

// Every run of 16 columns has one value of full magnitude, and no value lies near the middle between two codes: so the codes
// are known whatever the rounding of the scale.
Activations make_activations(int64_t tokens, int64_t cols, Random& random) {
  Activations a{cols + 3, {}, {}};
  a.x.assign(static_cast<size_t>(tokens * a.stride), std::numeric_limits<float>::quiet_NaN());
  a.rounded.resize(static_cast<size_t>(tokens * cols));
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t begin = 0; begin < cols; begin += 16) {
      if (begin % 32 == 0) random.stream = static_cast<uint64_t>(t * cols + begin);
      const double step = static_cast<float>(std::exp2(-8.0 + static_cast<double>((t + begin / 32) % 5)));
      const int64_t width = std::min<int64_t>(16, cols - begin), top = random.below(width);
      for (int64_t i = 0; i < width; ++i) {
        const double code = i == top ? (random.below(2) ? 127.0 : -127.0) : static_cast<double>(random.below(255) - 127);
        const double noise = i == top || std::abs(code) == 127 ? 0 : random.between(-0.35, 0.35);
        a.x[static_cast<size_t>(t * a.stride + begin + i)] = static_cast<float>(step * (code + noise));
        a.rounded[static_cast<size_t>(t * cols + begin + i)] = static_cast<float>(step * code);
      }
    }
  return a;
}

double activate(ActivationKind kind, double x) {
  switch (kind) {
    case ActivationKind::silu: return x / (1 + std::exp(-x));
    case ActivationKind::gelu: return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case ActivationKind::gelu_tanh: return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x)));
    case ActivationKind::relu: return std::max(x, 0.0);
    case ActivationKind::relu2: return std::max(x, 0.0) * std::max(x, 0.0);
  }
  return x;
}

// One case: a weight, a mode, and what the call adds to the product.
struct Check {
  cpu::Isa isa;
  std::string name;
  int failures = 0;

  void fail(const std::string& what) {
    if (++failures <= 3) std::printf("  FAILED %s, %s: %s\n", std::string(cpu::name_of(isa)).c_str(), name.c_str(), what.c_str());
  }
};

std::vector<double> widened_rows(const Canonical& weight, int64_t rows, int64_t cols) {
  std::vector<double> w(static_cast<size_t>(rows * cols));
  for (int64_t i = 0; i < rows * cols; ++i) {
    if (const auto* dense = std::get_if<Dense>(&weight)) {
      w[static_cast<size_t>(i)] = float_at(dense->values, i);
      continue;
    }
    const auto& a = std::get<Affine>(weight);
    const int64_t g = i / cols * (cols / a.group) + i % cols / a.group;
    w[static_cast<size_t>(i)] = static_cast<double>(a.scale.as<float>()[g]) * (a.codes.as<uint8_t>()[i] - a.zero) +
                                (a.offset.empty() ? 0.0 : static_cast<double>(a.offset.as<float>()[g]));
  }
  return w;
}

struct Expected {
  std::vector<double> value, tolerance;  // (tokens, outputs)
};

Expected expect(const std::vector<double>& w, const float* x, int64_t x_stride, const LinearCall& call, int64_t rows,
                int64_t cols) {
  const int64_t outputs = call.gated ? rows / 2 : rows;
  Expected e;
  for (int64_t t = 0; t < call.tokens; ++t) {
    std::vector<double> sums(static_cast<size_t>(rows)), errors(static_cast<size_t>(rows));
    for (int64_t r = 0; r < rows; ++r) {
      double sum = call.bias ? call.bias[r] : 0, size = std::abs(sum);
      for (int64_t c = 0; c < cols; ++c) {
        const double product = w[static_cast<size_t>(r * cols + c)] * x[t * x_stride + c];
        sum += product;
        size += std::abs(product);
      }
      sums[static_cast<size_t>(r)] = sum;
      errors[static_cast<size_t>(r)] = 1e-6 * size;
    }
    for (int64_t r = 0; r < outputs; ++r) {
      double value = sums[static_cast<size_t>(r)], error = errors[static_cast<size_t>(r)];
      if (call.gated) {
        const double gate = activate(call.activation, value), up = sums[static_cast<size_t>(outputs + r)];
        error = 1.2 * error * std::abs(up) + std::abs(gate) * errors[static_cast<size_t>(outputs + r)] + 1e-6 * std::abs(gate * up);
        value = gate * up;
      }
      if (call.residual) value += call.residual[t * call.residual_stride + r];
      e.value.push_back(value);
      e.tolerance.push_back(error + 2e-7 * std::abs(value) + 1e-30);
    }
  }
  return e;
}

void check_call(Check& check, ThreadPool& threads, const WeightCase& weight_case, Shape shape, bool quantize, bool gated) {
  const auto [rows, cols] = shape;
  Random random{static_cast<uint64_t>(rows * 10007 + cols)};
  const Canonical canonical = make_weight(weight_case, rows, cols, random);
  const auto packed = cpu::pack_matrix({.name = check.name, .sources = {}, .shape = {rows, cols}}, canonical);
  const Activations a = make_activations(kMostTokens, cols, random);
  const int64_t outputs = gated ? rows / 2 : rows;
  std::vector<float> bias(static_cast<size_t>(rows)), residual(static_cast<size_t>(kMostTokens * outputs));
  for (float& v : bias) v = static_cast<float>(random.between(-3, 3));
  for (float& v : residual) v = static_cast<float>(random.between(-3, 3));
  std::vector<std::byte> scratch(static_cast<size_t>(cpu::linear_scratch_bytes(kMostTokens, cols)) + 64);
  auto* aligned = scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64);
  const float poison = -12345.678f;
  const int64_t stride = outputs + 5;

  const auto run = [&](LinearCall call, int64_t first, int64_t tokens, bool in_place) {
    std::vector<float> out(static_cast<size_t>(tokens * stride + 16), poison);
    call.x += first * a.stride;
    call.tokens = tokens;
    call.out = out.data() + 8;
    if (call.residual) call.residual += first * call.residual_stride;
    if (call.residual && in_place) {
      for (int64_t t = 0; t < tokens; ++t) std::copy_n(call.residual + t * outputs, outputs, call.out + t * stride);
      call.residual = call.out;
      call.residual_stride = stride;
    }
    cpu::linear(threads, check.isa, aligned, call);
    for (size_t i = 0; i < out.size(); ++i) {
      const int64_t at = static_cast<int64_t>(i) - 8;
      if ((at < 0 || at >= tokens * stride || at % stride >= outputs) && out[i] != poison)
        check.fail(concat("wrote outside its rows, at ", at, " with ", tokens, " tokens"));
    }
    return out;
  };

  for (const int variant : {0, 1, 2}) {
    LinearCall call{.weight = packed.get(), .x = a.x.data(), .x_stride = a.stride, .tokens = kMostTokens, .out_stride = stride};
    call.gated = gated;
    call.activation = static_cast<ActivationKind>((variant + rows) % 4);
    call.quantize_activations = quantize;
    if (variant > 0) call.bias = bias.data();
    if (variant > 1) call.residual = residual.data(), call.residual_stride = outputs;

    const bool rounded = quantize && packed->matrix().unit > 0;
    const Expected expected = expect(widened_rows(canonical, rows, cols), rounded ? a.rounded.data() : a.x.data(),
                                     rounded ? cols : a.stride, call, rows, cols);
    const auto whole = run(call, 0, kMostTokens, false);
    for (int64_t i = 0; i < kMostTokens * outputs; ++i) {
      const double got = whole[static_cast<size_t>(8 + i / outputs * stride + i % outputs)],
                   want = expected.value[static_cast<size_t>(i)];
      if (!(std::abs(got - want) <= expected.tolerance[static_cast<size_t>(i)]))
        check.fail(concat("variant ", variant, " token ", i / outputs, " output ", i % outputs, ": ", got, " instead of ", want,
                          " +- ", expected.tolerance[static_cast<size_t>(i)]));
    }
    for (const int64_t tokens : kTokens) {
      const int64_t first = (kMostTokens - tokens) / 2;
      const auto part = run(call, first, tokens, variant > 1);
      for (int64_t t = 0; t < tokens; ++t)
        if (std::memcmp(part.data() + 8 + t * stride, whole.data() + 8 + (first + t) * stride, static_cast<size_t>(outputs) * 4) !=
            0)
          check.fail(
              concat("variant ", variant, ": token ", first + t, " differs between a batch of ", tokens, " and of ", kMostTokens));
    }
  }
  if (gated) return;

  std::vector<float> row(static_cast<size_t>(cols));
  for (int64_t r = 0; r < rows; ++r) {
    cpu::unpack_row(*packed, r, row.data());
    for (int64_t c = 0; c < cols; ++c) {
      float want = 0;
      if (const auto* dense = std::get_if<Dense>(&canonical)) want = float_at(dense->values, r * cols + c);
      if (const auto* w = std::get_if<Affine>(&canonical)) {
        const int64_t g = r * (cols / w->group) + c / w->group;
        want = w->scale.as<float>()[g] * static_cast<float>(w->codes.as<uint8_t>()[r * cols + c] - w->zero);
        if (!w->offset.empty()) want += w->offset.as<float>()[g];
      }
      if (row[static_cast<size_t>(c)] != want) check.fail(concat("unpack_row ", r, " column ", c));
    }
  }

  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    Activations broken = a;
    broken.x[static_cast<size_t>(2 * a.stride + cols - 1)] = bad;
    LinearCall call{.weight = packed.get(), .x = a.x.data(), .x_stride = a.stride, .tokens = 5, .out_stride = stride};
    call.quantize_activations = quantize;
    const auto clean = run(call, 0, 5, false);
    call.x = broken.x.data();
    const auto dirty = run(call, 0, 5, false);
    for (int64_t i = 0; i < 5 * outputs; ++i) {
      const size_t at = static_cast<size_t>(8 + i / outputs * stride + i % outputs);
      if (i / outputs == 2 ? std::isfinite(dirty[at]) : dirty[at] != clean[at])
        check.fail(concat("a token with ", bad, ": output ", i));
    }
  }
}

}  // namespace

bool check_linear(cpu::Isa isa, const std::string& only) {
  ThreadPool one(1), three(3);
  int failures = 0, cases = 0;
  for (const WeightCase& weight : kWeights)
    for (const Shape shape : kShapes) {
      if ((weight.group && shape.cols % weight.group) || weight.name.find(only) == std::string::npos) continue;
      for (const bool quantize : {false, true})
        for (const bool gated : {false, true}) {
          if (quantize && weight.bits == 0) continue;
          if (gated && shape.rows % 2) continue;
          Check check{isa, concat(weight.name, " (", shape.rows, ", ", shape.cols, ")", quantize ? " quantized" : " exact",
                                  gated ? " gated" : "")};
          check_call(check, cases % 2 ? three : one, weight, shape, quantize, gated);
          failures += check.failures;
          ++cases;
        }
    }
  std::printf("%s: %d cases, %d failures\n", std::string(cpu::name_of(isa)).c_str(), cases, failures);
  return failures == 0;
}

}  // namespace maga::bench
