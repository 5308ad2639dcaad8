// Every row kernel against plain loops in double precision: all types, odd widths, strides and offsets, in place.
#include "core/codes.h"
#include "cuda_rows.h"

namespace maga::bench {

using namespace cuda;

std::vector<uint8_t> encode(DType type, const std::vector<float>& values) {
  std::vector<uint8_t> bytes(values.size() * size_of(type));
  for (size_t i = 0; i < values.size(); ++i) {
    if (type == DType::f32) {
      std::memcpy(&bytes[i * 4], &values[i], 4);
    } else {
      const uint16_t bits = type == DType::bf16 ? float_to_bf16(values[i]) : float_to_f16(values[i]);
      std::memcpy(&bytes[i * 2], &bits, 2);
    }
  }
  return bytes;
}

std::vector<float> decode(DType type, const std::vector<uint8_t>& bytes) {
  std::vector<float> values(bytes.size() / size_of(type));
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t bits;
    if (type == DType::f32) {
      std::memcpy(&values[i], &bytes[i * 4], 4);
    } else {
      std::memcpy(&bits, &bytes[i * 2], 2);
      values[i] = type == DType::bf16 ? bf16_to_float(bits) : f16_to_float(bits);
    }
  }
  return values;
}

float round_to(DType type, double value) {
  const float x = static_cast<float>(value);
  return type == DType::f32 ? x : type == DType::bf16 ? bf16_to_float(float_to_bf16(x)) : f16_to_float(float_to_f16(x));
}

View::View(DType type, int64_t rows, int width, int64_t stride, int64_t offset)
    : type_(type),
      rows_(rows),
      width_(width),
      stride_(stride),
      offset_(offset),
      buffer_((offset + rows * stride + 64) * size_of(type)),
      values_(rows * width) {
  MAGA_CUDA(cudaMemset(buffer_.get(), kPoison, buffer_.bytes()));
}

std::vector<size_t> View::places() const {
  std::vector<size_t> places;
  for (int64_t r = 0; r < rows_; ++r)
    for (int64_t c = 0; c < width_; ++c) places.push_back((offset_ + r * stride_ + c) * size_of(type_));
  return places;
}

void View::fill(Random& random, double range) {
  std::vector<float> values(rows_ * width_);
  for (float& v : values) v = random.between(-range, range);
  set(values);
}

void View::set(const std::vector<float>& values) {
  const std::vector<uint8_t> encoded = encode(type_, values);
  values_ = decode(type_, encoded);
  std::vector<uint8_t> bytes(buffer_.bytes(), kPoison);
  const std::vector<size_t> at = places();
  for (size_t i = 0; i < at.size(); ++i) std::memcpy(&bytes[at[i]], &encoded[i * size_of(type_)], size_of(type_));
  MAGA_CUDA(cudaMemcpy(buffer_.get(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
}

Matrix View::matrix() const { return {buffer_.get<uint8_t>() + offset_ * size_of(type_), stride_}; }

bool View::read() {
  std::vector<uint8_t> bytes = buffer_.download<uint8_t>(), inside;
  for (const size_t at : places())
    for (int64_t b = 0; b < size_of(type_); ++b) {
      inside.push_back(bytes[at + b]);
      bytes[at + b] = kPoison;
    }
  values_ = decode(type_, inside);
  return std::all_of(bytes.begin(), bytes.end(), [](uint8_t b) { return b == kPoison; });
}

namespace {

constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16};
const Queue kQueue{};

struct Place {
  int64_t stride_more, offset;  // beyond the width; first column
};
constexpr Place kPlaces[] = {{0, 0}, {64, 16}, {3, 1}};

struct Checker {
  Report& report;
  DType type;
  std::string name;

  // All of `out` against expected values, each with its own allowance beyond half a unit in the last place.
  void compare(View& out, const std::vector<double>& expected, double slack) {
    bool right = out.read();
    for (size_t i = 0; i < expected.size(); ++i) {
      const double allowed = 1.01 * half_ulp(type) * std::abs(expected[i]) + slack;
      const double error = std::abs(out.values()[i] - expected[i]);
      right &= error <= allowed;  // false for NaN
      if (!std::isnan(error)) report.worst = std::max(report.worst, error / allowed);
    }
    report.expect(right, name + " " + std::string(name_of(type)));
  }
};

Buffer typed(DType type, const std::vector<float>& values) { return Buffer(encode(type, values)); }

std::vector<float> random_values(DType type, Random& random, int count, double low, double high) {
  std::vector<float> values(count);
  for (float& v : values) v = round_to(type, random.between(low, high));
  return values;
}

std::vector<double> normed(const std::vector<float>& x, int rows, int width, int group, NormKind kind,
                           const std::vector<float>& weight, const std::vector<float>& bias, double eps, double offset) {
  std::vector<double> y(x.size());
  for (int64_t first = 0; first < int64_t{rows} * width; first += group) {
    double mean = 0, squares = 0;
    if (kind == NormKind::layer)
      for (int i = 0; i < group; ++i) mean += x[first + i] / static_cast<double>(group);
    for (int i = 0; i < group; ++i) squares += (x[first + i] - mean) * (x[first + i] - mean);
    const double inverse = 1 / std::sqrt(squares / group + eps);
    for (int i = 0; i < group; ++i)
      y[first + i] = (x[first + i] - mean) * inverse * (weight.empty() ? 1 : weight[i] + offset) + (bias.empty() ? 0 : bias[i]);
  }
  return y;
}

void check_norm(Report& report, DType type, int rows, int width, int group, int slabs, const Place& place, Random& random) {
  for (const NormKind kind : {NormKind::rms, NormKind::layer}) {
    Checker checker{report, type,
                    concat("norm ", rows, "x", width, " group ", group, " slabs ", slabs, " offset ", place.offset, " layer ",
                           kind == NormKind::layer)};
    const int64_t stride = width + place.stride_more;
    const std::vector<float> weight = random_values(type, random, group, -1.5, 1.5);
    const std::vector<float> bias = kind == NormKind::layer ? random_values(type, random, group, -1, 1) : std::vector<float>();
    const Buffer w = typed(type, weight), b = typed(type, bias);
    View in(type, rows, width, stride, place.offset), sum(type, rows, width, stride, place.offset);
    in.fill(random, 3);
    NormArgs args{.in = in.matrix(),
                  .out = in.matrix(),  // in place
                  .rows = rows,
                  .width = width,
                  .group = group,
                  .weight = w.get(),
                  .bias = bias.empty() ? nullptr : b.get(),
                  .kind = kind,
                  .eps = 1e-5f,
                  .weight_offset = kind == NormKind::rms ? 1.f : 0.f};
    std::vector<float> partial(static_cast<size_t>(slabs) * rows * width), slab_bias = random_values(type, random, width, -1, 1);
    for (float& v : partial) v = random.between(-1, 1);
    const Buffer p(partial), sb = typed(type, slab_bias);
    std::vector<float> normalised = in.values();
    View out(type, rows, width, stride + 8, place.offset);
    if (slabs > 0) {
      args.slabs = {p.get<float>(), slabs, sb.get()};
      args.residual = args.sum = in.matrix();  // the residual stream, in place
      args.in = {};
      args.out = out.matrix();
      std::vector<double> expected(normalised.begin(), normalised.end());
      for (size_t i = 0; i < expected.size(); ++i) {
        expected[i] += slab_bias[i % width];
        for (int s = 0; s < slabs; ++s) expected[i] += partial[s * expected.size() + i];
      }
      norm(kQueue, type, args);
      checker.compare(in, expected, 2e-6);
      normalised = in.values();
    } else {
      norm(kQueue, type, args);
    }
    checker.compare(slabs > 0 ? out : in, normed(normalised, rows, width, group, kind, weight, bias, args.eps, args.weight_offset),
                    1e-5);
  }
}

double activate(ActivationKind kind, double x) {
  switch (kind) {
    case ActivationKind::silu: return x / (1 + std::exp(-x));
    case ActivationKind::gelu: return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case ActivationKind::gelu_tanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / 3.14159265358979324) * (x + 0.044715 * x * x * x)));
    case ActivationKind::relu: return std::max(x, 0.0);
  }
  return x;
}

void check_each(Report& report, DType type, int rows, int width, const Place& place, Random& random) {
  const int64_t stride = width + place.stride_more;
  Checker checker{report, type, ""};
  auto named = [&](const char* op) { checker.name = concat(op, " ", rows, "x", width, " offset ", place.offset); };
  auto view = [&](double range) {
    auto v = std::make_unique<View>(type, rows, width, stride, place.offset);
    if (range > 0) v->fill(random, range);
    return v;
  };
  for (int kind = 0; kind < 4; ++kind)
    for (const bool gated : {true, false}) {
      named("activation");
      auto gate = view(8), up = view(2);
      std::vector<double> expected;
      for (size_t i = 0; i < gate->values().size(); ++i)
        expected.push_back(activate(static_cast<ActivationKind>(kind), gate->values()[i]) * (gated ? up->values()[i] : 1));
      activation(kQueue, type,
                 {.gate = gate->matrix(),
                  .up = gated ? up->matrix() : Matrix{},
                  .out = gate->matrix(),
                  .rows = rows,
                  .width = width,
                  .kind = static_cast<ActivationKind>(kind)});
      checker.compare(*gate, expected, 6e-6);
    }
  {
    named("add");
    auto a = view(3), b = view(3);
    std::vector<double> expected;
    for (size_t i = 0; i < a->values().size(); ++i) expected.push_back(double{a->values()[i]} + b->values()[i]);
    add(kQueue, type, {.a = a->matrix(), .b = b->matrix(), .out = a->matrix(), .rows = rows, .width = width});
    checker.compare(*a, expected, 1e-7);
  }
  {
    named("embed");
    constexpr int kVocab = 17;
    View table(type, kVocab, width, width, 0);
    table.fill(random, 2);
    std::vector<int32_t> ids(rows), chosen(rows);
    for (int r = 0; r < rows; ++r) {
      chosen[r] = random.below(kVocab);
      ids[r] = r % 3 == 1 ? -1 - random.below(rows) : random.below(kVocab);
    }
    const Buffer i(ids), c(chosen);
    auto out = view(0);
    std::vector<double> expected;
    for (int r = 0; r < rows; ++r)
      for (int x = 0; x < width; ++x) expected.push_back(1.5 * table.at(ids[r] < 0 ? chosen[-1 - ids[r]] : ids[r], x));
    DeviceStep step{.tokens = rows, .ids = i.get<int32_t>(), .chosen = c.get<int32_t>()};
    embed(kQueue, type, step, {.table = table.matrix().data, .out = out->matrix(), .width = width, .scale = 1.5f});
    checker.compare(*out, expected, 1e-7);
  }
  {
    named("select");
    auto in = view(3);
    std::vector<int32_t> at;
    for (int r = 0; r < rows; r += 2) at.push_back(r);
    const Buffer picked(at);
    View out(type, static_cast<int64_t>(at.size()), width, stride + 1, place.offset);
    std::vector<double> expected;
    for (const int r : at)
      for (int x = 0; x < width; ++x) expected.push_back(in->at(r, x));
    DeviceStep step{.rows = static_cast<int>(at.size()), .logit_rows = picked.get<int32_t>()};
    select(kQueue, type, step, {.in = in->matrix(), .out = out.matrix(), .width = width});
    checker.compare(out, expected, 0);
  }
  {
    named("widen and narrow");
    auto in = view(3), out = view(0);
    const Buffer middle(static_cast<size_t>(rows) * width * 4);
    widen(kQueue, type, in->matrix(), middle.get<float>(), rows, width);
    narrow(kQueue, type, middle.get<float>(), out->matrix(), rows, width);
    checker.compare(*out, {in->values().begin(), in->values().end()}, 0);
  }
  for (const int slabs : {1, 5, 8}) {
    named("reduce");
    auto residual = view(3), out = view(0);
    std::vector<float> partial(static_cast<size_t>(slabs) * rows * width), bias = random_values(type, random, width, -1, 1);
    for (float& v : partial) v = random.between(-1, 1);
    const Buffer p(partial), b = typed(type, bias);
    std::vector<double> expected(residual->values().begin(), residual->values().end());
    for (size_t i = 0; i < expected.size(); ++i) {
      expected[i] += bias[i % width];
      for (int s = 0; s < slabs; ++s) expected[i] += partial[s * expected.size() + i];
    }
    reduce(kQueue, type,
           {.slabs = {p.get<float>(), slabs, b.get()},
            .residual = residual->matrix(),
            .out = out->matrix(),
            .rows = rows,
            .width = width});
    checker.compare(*out, expected, 2e-6);
  }
}

struct Heads {
  int heads, kv_heads, head_dim, v_dim, rotary_dim;
  bool interleaved, norms;
};

void check_prepare(Report& report, DType type, DType kv_type, int rows, const Heads& h, int slabs, const Place& place,
                   Random& random) {
  const int page_tokens = 4, pages_there = std::max(5, rows / page_tokens + 1);
  const int q_width = h.heads * h.head_dim, k_width = h.kv_heads * h.head_dim, v_width = h.kv_heads * h.v_dim;
  const int width = q_width + k_width + v_width;
  Checker checker{
      report, type,
      concat("prepare_qkv ", rows, " rows ", h.heads, "/", h.kv_heads, " heads of ", h.head_dim, "/", h.v_dim, " rotary ",
             h.rotary_dim, " interleaved ", h.interleaved, " norms ", h.norms, " slabs ", slabs, " kv ", name_of(kv_type))};
  View qkv(type, rows, width, width + place.stride_more, place.offset), q_out(type, rows, std::max(1, q_width), q_width + 8, 0);
  qkv.fill(random, 3);
  const std::vector<float> before = qkv.values();
  std::vector<float> partial(static_cast<size_t>(slabs) * rows * width), bias = random_values(type, random, width, -1, 1);
  for (float& v : partial) v = random.between(-1, 1);
  const int half = h.rotary_dim / 2;
  std::vector<float> turns(rows * half * 2);
  for (int i = 0; i < rows * half; ++i) {
    const double angle = random.between(-3, 3);
    turns[2 * i] = static_cast<float>(std::cos(angle));
    turns[2 * i + 1] = static_cast<float>(std::sin(angle));
  }
  const std::vector<float> qn = random_values(type, random, h.head_dim, 0.5, 1.5),
                           kn = random_values(type, random, h.head_dim, 0.5, 1.5);
  std::vector<int64_t> slots = {3, 19, -1, 0, 7, 12, 5};
  for (int r = static_cast<int>(slots.size()); r < rows; ++r) slots.push_back(r > 19 ? r : -1);
  const Buffer p(partial), b = typed(type, bias), t(turns), qw = typed(type, qn), kw = typed(type, kn), s(slots);
  const int64_t entries = int64_t{page_tokens} * h.kv_heads;
  const bool codes = is_code(kv_type);
  const int64_t page_stride = entries * (h.head_dim + h.v_dim + (codes ? 4 : 0));
  std::vector<uint8_t> poison(pages_there * page_stride * size_of(kv_type), kPoison);
  const Buffer pages(poison);
  uint8_t* const pool = pages.get<uint8_t>();
  auto* const scales = reinterpret_cast<uint16_t*>(pool + entries * (h.head_dim + h.v_dim));
  auto columns = [&](int first) {
    Matrix m = qkv.matrix();
    m.data = static_cast<uint8_t*>(m.data) + first * size_of(type);
    return m;
  };
  PrepareArgs args{.q = slabs > 0 ? q_out.matrix() : columns(0),
                   .k = columns(q_width),
                   .v = columns(q_width + k_width),
                   .rows = rows,
                   .heads = h.heads,
                   .kv_heads = h.kv_heads,
                   .q_norm = h.norms ? qw.get() : nullptr,
                   .k_norm = h.norms ? kw.get() : nullptr,
                   .eps = 1e-6f,
                   .weight_offset = 0.25f,
                   .rotary_dim = h.rotary_dim,
                   .interleaved = h.interleaved,
                   .turns = half > 0 ? t.get<float2>() : nullptr,
                   .layer = {.k = pool,
                             .v = pool + entries * h.head_dim * size_of(kv_type),
                             .page_stride = page_stride,
                             .k_head_stride = int64_t{page_tokens} * h.head_dim,
                             .v_head_stride = int64_t{page_tokens} * h.v_dim,
                             .page_tokens = page_tokens,
                             .kv_heads = h.kv_heads,
                             .head_dim = h.head_dim,
                             .v_dim = h.v_dim,
                             .k_scales = codes ? scales : nullptr,
                             .v_scales = codes ? scales + entries : nullptr,
                             .scale_stride = page_stride / 2},
                   .kv_type = kv_type};
  if (slabs > 0) args.slabs = {p.get<float>(), slabs, b.get()};
  DeviceStep step{.tokens = rows, .slots = s.get<int64_t>()};
  prepare_qkv(kQueue, type, step, args);

  bool right = qkv.read() & (slabs == 0 || q_out.read());
  std::vector<uint8_t> stored = pages.download<uint8_t>();
  // What lies at a place, which is poison again afterwards.
  const auto take = [&](int64_t element, int64_t size) {
    const std::vector<uint8_t> bytes(stored.begin() + element * size, stored.begin() + (element + 1) * size);
    std::fill_n(stored.begin() + element * size, size, kPoison);
    return bytes;
  };
  int64_t written = 0;
  auto near = [&](float got, double expected, double magnitude, DType last) {
    const double allowed = (5.1 * half_ulp(type) + 1.1 * half_ulp(last)) * magnitude + 1e-5;
    const double error = std::abs(got - expected);
    if (!std::isnan(error)) report.worst = std::max(report.worst, error / allowed);
    return error <= allowed;
  };
  for (int r = 0; r < rows; ++r) {
    std::vector<float> x(before.begin() + r * width, before.begin() + (r + 1) * width);
    if (slabs > 0)
      for (int c = 0; c < width; ++c) {
        double sum = bias[c];
        for (int i = 0; i < slabs; ++i) sum += partial[(static_cast<size_t>(i) * rows + r) * width + c];
        x[c] = round_to(type, sum);
      }
    for (int head = 0; head < h.heads + 2 * h.kv_heads; ++head) {
      const bool is_q = head < h.heads, is_v = head >= h.heads + h.kv_heads;
      const int n = is_v ? h.v_dim : h.head_dim;
      const int kv_head = is_q ? 0 : is_v ? head - h.heads - h.kv_heads : head - h.heads;
      const int first = is_v ? q_width + k_width + kv_head * n : head * n;
      std::vector<float> y(x.begin() + first, x.begin() + first + n);
      if (h.norms && !is_v) {
        const std::vector<double> z = normed(y, 1, n, n, NormKind::rms, is_q ? qn : kn, {}, args.eps, args.weight_offset);
        for (int i = 0; i < n; ++i) y[i] = round_to(type, z[i]);
      }
      const int64_t slot = slots[r], in_page = is_q || slot < 0 ? 0 : (int64_t{kv_head} * page_tokens + slot % page_tokens);
      float scale = 0;
      double most = 0;
      if (codes && !is_q && slot >= 0)
        scale = decode(DType::bf16, take(slot / page_tokens * page_stride / 2 + entries * (h.head_dim + h.v_dim) / 2 +
                                             (is_v ? entries : 0) + in_page,
                                         2))[0];
      for (int i = 0; i < n; ++i) {
        double expected = y[i], magnitude = std::abs(expected);
        if (!is_v && i < h.rotary_dim) {
          const bool second = h.interleaved ? i % 2 : i >= half;
          const int j = h.interleaved ? i / 2 : i % half, other = h.interleaved ? i ^ 1 : second ? i - half : i + half;
          const double c = turns[(r * half + j) * 2], sn = turns[(r * half + j) * 2 + 1];
          expected = y[i] * c + (second ? 1 : -1) * y[other] * sn;
          magnitude = std::abs(y[i]) + std::abs(y[other]);
        }
        if (is_q) {
          right &= near(slabs > 0 ? q_out.at(r, first + i) : qkv.at(r, first + i), expected, magnitude, type);
        } else if (slot >= 0) {
          const int64_t at = slot / page_tokens * page_stride + (is_v ? entries * h.head_dim : 0) + in_page * n + i;
          const std::vector<uint8_t> bytes = take(at, size_of(kv_type));
          if (codes) {
            const float code = kv_type == DType::i8        ? static_cast<float>(bytes[0] - 128)
                               : kv_type == DType::f8_e4m3 ? e4m3_to_float(bytes[0])
                                                           : e5m2_to_float(bytes[0]);
            const double step = kv_type == DType::i8        ? 0.5
                                : kv_type == DType::f8_e4m3 ? std::max(std::abs(code) / 16, 0x1p-10f)
                                                            : std::max(std::abs(code) / 8, 0x1p-17f);
            right &= std::abs(code * scale - expected) <= 1.01 * step * scale + 5.1 * half_ulp(type) * magnitude + 1e-5;
            right &= std::abs(code) <= largest_code(kv_type);
            most = std::max(most, std::abs(expected));
          } else {
            right &= near(decode(kv_type, bytes)[0], expected, magnitude, kv_type);
          }
          ++written;
        }
        if (!is_q && slabs == 0) right &= qkv.at(r, first + i) == before[r * width + first + i];  // k and v as they were
      }
      // The least scale that will do, but for the rounding of what it is made of.
      if (codes && !is_q && slot >= 0) right &= std::abs(scale * largest_code(kv_type) / most - 1) < 0.03;
    }
  }
  right &= std::all_of(stored.begin(), stored.end(), [](uint8_t byte) { return byte == kPoison; });
  report.expect(right && written > 0, checker.name + " " + std::string(name_of(type)));
}

void check_rope(Report& report, Random& random) {
  for (const bool dynamic : {false, true}) {
    constexpr int kTokens = 64, kRotary = 96;
    std::vector<float> inv_freq;
    for (int j = 0; j < kRotary / 2; ++j) inv_freq.push_back(static_cast<float>(std::pow(10000.0, -2.0 * j / kRotary)));
    std::vector<int32_t> positions(kTokens), sequence(kTokens), prompt = {10, 9000, 300};
    for (int t = 0; t < kTokens; ++t) {
      positions[t] = t % 2 ? random.below(1000000) : random.below(5000);
      sequence[t] = random.below(3);
    }
    const Buffer f(inv_freq), p(positions), s(sequence), l(prompt), turns(size_t{kTokens} * kRotary / 2 * 8);
    DeviceStep step{.tokens = kTokens,
                    .sequences = 3,
                    .positions = p.get<int32_t>(),
                    .prompt_length = l.get<int32_t>(),
                    .token_sequence = s.get<int32_t>()};
    rope_turns(kQueue, step,
               {.inv_freq = f.get<float>(),
                .rotary_dim = kRotary,
                .multiplier = 1.25f,
                .positions = step.positions,
                .theta = 10000,
                .dynamic_factor = dynamic ? 2.f : 0.f,
                .max_positions = 4096,
                .turns = turns.get<float2>()});
    const std::vector<float2> got = turns.download<float2>();
    bool right = true;
    for (int t = 0; t < kTokens; ++t)
      for (int j = 0; j < kRotary / 2; ++j) {
        float frequency = inv_freq[j];
        const double length = std::max(prompt[sequence[t]], positions[t] + 1);
        if (dynamic && length > 4096) {
          const double base = 10000 * std::pow(2 * length / 4096 - 1, kRotary / (kRotary - 2.0));
          frequency = static_cast<float>(std::pow(base, -2.0 * j / kRotary));
        }
        // A frequency may differ in its last bit from ours.
        const float angle = frequency * static_cast<float>(positions[t]);
        const double slack = 4e-7 + (dynamic ? 1.3e-7 * angle : 0);
        const float2 g = got[t * kRotary / 2 + j];
        right &= std::abs(g.x - 1.25 * std::cos(static_cast<double>(angle))) <= slack &&
                 std::abs(g.y - 1.25 * std::sin(static_cast<double>(angle))) <= slack;
      }
    report.expect(right, concat("rope_turns dynamic ", dynamic));
  }
  for (const DType type : kTypes)
    for (const Place& place : kPlaces)
      for (const bool interleaved : {false, true}) {
        constexpr int kRows = 5, kHeads = 3, kHeadDim = 80, kRotary = 64;
        View x(type, kRows, kHeads * kHeadDim, kHeads * kHeadDim + place.stride_more, place.offset);
        x.fill(random, 2);
        std::vector<float> turns(kRows * kRotary);
        for (float& v : turns) v = random.between(-1, 1);
        const Buffer t(turns);
        std::vector<double> expected(x.values().begin(), x.values().end());
        for (int r = 0; r < kRows; ++r)
          for (int head = 0; head < kHeads; ++head)
            for (int j = 0; j < kRotary / 2; ++j) {
              double* row = &expected[(r * kHeads + head) * kHeadDim];
              double& a = row[interleaved ? 2 * j : j];
              double& b = row[interleaved ? 2 * j + 1 : j + kRotary / 2];
              const double c = turns[(r * kRotary / 2 + j) * 2], s = turns[(r * kRotary / 2 + j) * 2 + 1], first = a;
              a = first * c - b * s;
              b = b * c + first * s;
            }
        rope(kQueue, type,
             {.x = x.matrix(),
              .rows = kRows,
              .heads = kHeads,
              .head_dim = kHeadDim,
              .rotary_dim = kRotary,
              .interleaved = interleaved,
              .turns = t.get<float2>()});
        Checker{report, type, concat("rope offset ", place.offset, " interleaved ", interleaved)}.compare(x, expected, 1e-6);
      }
}

}  // namespace

void check_rows(Report& report, bool small) {
  Random random(3);
  for (const DType type : kTypes)
    for (const Place& place : kPlaces) {
      const std::vector<int> widths = small ? std::vector<int>{33, 256} : std::vector<int>{1, 33, 256, 1000, 4096, 5120, 20000};
      for (const int width : widths)
        for (const int rows : {1, 5, width == 1000 ? 301 : 7}) {
          check_norm(report, type, rows, width, width, 0, place, random);
          for (const int slabs : {1, 2, 4, 8}) check_norm(report, type, rows, width, width, slabs, place, random);
          check_each(report, type, rows, width, place, random);
        }
      for (const int group : {1, 8, 20, 64, 128, 300, 512}) check_norm(report, type, 3, group * 5, group, 0, place, random);
      for (const DType kv : {DType::f32, DType::f16, DType::bf16, DType::i8, DType::f8_e4m3, DType::f8_e5m2})
        for (const int slabs : {0, 1, 8})
          for (const Heads& heads :
               {Heads{8, 2, 128, 128, 128, false, true}, Heads{4, 4, 64, 64, 32, false, false},
                Heads{3, 1, 80, 48, 80, false, true}, Heads{4, 2, 96, 96, 24, true, true}, Heads{2, 2, 256, 128, 256, true, false},
                Heads{0, 3, 128, 64, 0, false, false}, Heads{3, 1, 26, 30, 14, false, true}, Heads{1, 1, 7, 5, 0, false, true}})
            check_prepare(report, type, kv, 7, heads, slabs, place, random);
    }
  // Rows enough that CTAs take several, or a thread several heads.
  for (const DType type : kTypes) {
    check_norm(report, type, 1601, 4096, 4096, 0, kPlaces[1], random);
    check_norm(report, type, 301, 4096, 4096, 2, kPlaces[0], random);
    for (const bool norms : {false, true})
      for (const Heads& heads : {Heads{8, 2, 128, 128, 128, false, norms}, Heads{9, 3, 64, 64, 0, false, norms}})
        check_prepare(report, type, type, 4001, heads, 0, kPlaces[1], random);
  }
  check_rope(report, random);
}

}  // namespace maga::bench
