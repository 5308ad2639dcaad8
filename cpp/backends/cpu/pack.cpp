// Canonical weights into panels (see PackedMatrix), and single rows back.
#include <cstdlib>
#include <cstring>
#include <new>

#include "backends/cpu/weight.h"

namespace maga::cpu {
namespace {

constexpr int64_t kAlignment = 64;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

std::shared_ptr<std::byte> allocate(int64_t bytes) {
  auto* data = static_cast<std::byte*>(std::aligned_alloc(kAlignment, round_up(std::max<int64_t>(bytes, 1), kAlignment)));
  if (data == nullptr) throw std::bad_alloc();
  return {data, [](std::byte* p) { std::free(p); }};
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + ")";
}

void require_shape(const WeightSpec& spec, const char* part, const Tensor& tensor, const std::vector<int64_t>& expected) {
  MAGA_REQUIRE(tensor.shape == expected, "weight ", spec.name, ": ", part, " have shape ", shape_text(tensor.shape), " where ",
               shape_text(expected), " is needed");
}

bool fits_half(const Tensor& tensor) {
  const float* values = tensor.as<float>();
  for (int64_t i = 0; i < tensor.elements(); ++i)
    if (!(f16_to_float(float_to_f16(values[i])) == values[i])) return false;
  return true;
}

// Writes get(row, col) of (rows, cols) to [row / 16][col][row % 16], with `panel_stride` elements a panel.
template <typename T, typename Get>
void fill_panels(int64_t rows, int64_t cols, T* to, int64_t panel_stride, Get get) {
  constexpr int64_t kColumns = (16 << 10) / (kPanelRows * sizeof(T));  // whose part of a panel stays in the L1 cache
  for (int64_t first = 0; first < rows; first += kPanelRows)
    for (int64_t begin = 0; begin < cols; begin += kColumns)
      for (int64_t row = first; row < std::min<int64_t>(first + kPanelRows, rows); ++row) {
        T* panel = to + first / kPanelRows * panel_stride + row % kPanelRows;
        for (int64_t col = begin; col < std::min(begin + kColumns, cols); ++col) panel[col * kPanelRows] = get(row, col);
      }
}

template <typename T>
void interleave(const T* from, int64_t rows, int64_t cols, T* to, int64_t panel_stride) {
  fill_panels(rows, cols, to, panel_stride, [&](int64_t row, int64_t col) { return from[row * cols + col]; });
}

std::shared_ptr<const PackedWeight> finish(PackedMatrix& m, std::shared_ptr<std::byte> storage) {
  return std::make_shared<const PackedWeight>(m, std::move(storage), m.panels * m.panel_bytes);
}

std::shared_ptr<std::byte> allocate_panels(PackedMatrix& m) {
  auto storage = allocate(m.panels * m.panel_bytes);
  std::memset(storage.get(), 0, static_cast<size_t>(m.panels * m.panel_bytes));
  m.data = storage.get();
  return storage;
}

std::shared_ptr<const PackedWeight> pack_dense(const WeightSpec& spec, const Tensor& values) {
  PackedMatrix m;
  switch (values.dtype) {
    case DType::f32: m.form = Form::f32; break;
    case DType::f16: m.form = Form::f16; break;
    case DType::bf16: m.form = Form::bf16; break;
    default:
      MAGA_REQUIRE(false, "weight ", spec.name, ": ", name_of(values.dtype), " is not a type that the cpu backend multiplies");
  }
  m.rows = values.shape[0];
  m.cols = values.shape[1];
  m.panels = divide_up(m.rows, kPanelRows);
  m.panel_bytes = round_up(m.cols * kPanelRows * size_of(values.dtype), kAlignment);
  auto storage = allocate_panels(m);
  if (values.dtype == DType::f32)
    interleave(values.as<float>(), m.rows, m.cols, reinterpret_cast<float*>(storage.get()), m.panel_bytes / 4);
  else
    interleave(values.as<uint16_t>(), m.rows, m.cols, reinterpret_cast<uint16_t*>(storage.get()), m.panel_bytes / 2);
  return finish(m, std::move(storage));
}

void pack_scales(const Tensor& values, const PackedMatrix& m, std::byte* to) {
  const int64_t groups = values.shape[1];
  if (!m.half_scales) return interleave(values.as<float>(), m.rows, groups, reinterpret_cast<float*>(to), m.panel_bytes / 4);
  std::vector<uint16_t> halves(static_cast<size_t>(values.elements()));
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = float_to_f16(values.as<float>()[i]);
  interleave(halves.data(), m.rows, groups, reinterpret_cast<uint16_t*>(to), m.panel_bytes / 2);
}

// The next four codes as one word, the first lowest; 0 behind the last.
uint32_t four(const uint8_t* codes, int64_t left) {
  uint32_t word = 0;
  if (left >= 4)
    std::memcpy(&word, codes, 4);
  else if (left > 0)
    std::memcpy(&word, codes, static_cast<size_t>(left));
  return word;
}

// Returns the bitwise or of all codes.
uint8_t pack_codes(const uint8_t* codes, const PackedMatrix& m, std::byte* to) {
  const bool nibbles = m.form == Form::nibbles;
  const int64_t step = nibbles ? 8 : 4;  // codes of a word
  uint32_t seen = 0;
  fill_panels(m.rows, divide_up(m.cols, step), reinterpret_cast<uint32_t*>(to), m.panel_bytes / 4, [&](int64_t row, int64_t i) {
    const uint8_t* from = codes + row * m.cols + i * step;
    const uint32_t low = four(from, m.cols - i * step), high = nibbles ? four(from + 4, m.cols - i * step - 4) : 0;
    seen |= low | high;
    return low | high << 4;
  });
  seen |= seen >> 16;
  return static_cast<uint8_t>(seen | seen >> 8);
}

// Groups that no unit of 16 columns divides have no integer kernel.
Tensor widen(const Affine& w) {
  const int64_t rows = w.codes.shape[0], cols = w.codes.shape[1], groups = cols / w.group;
  auto storage = allocate(rows * cols * 4);
  auto* values = reinterpret_cast<float*>(storage.get());
  const uint8_t* codes = w.codes.as<uint8_t>();
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c) {
      const int64_t g = r * groups + c / w.group;
      const float value = w.scale.as<float>()[g] * static_cast<float>(codes[r * cols + c] - w.zero);
      values[r * cols + c] = w.offset.empty() ? value : value + w.offset.as<float>()[g];
    }
  return {storage.get(), DType::f32, {rows, cols}, storage};
}

std::shared_ptr<const PackedWeight> pack_affine(const WeightSpec& spec, const Affine& w) {
  const auto& name = spec.name;
  MAGA_REQUIRE(w.codes.dtype == DType::u8, "weight ", name, ": codes are ", name_of(w.codes.dtype), ", not uint8");
  MAGA_REQUIRE(w.bits >= 1 && w.bits <= 8, "weight ", name, ": codes of ", w.bits, " bits; 1 to 8 can be taken");
  MAGA_REQUIRE(w.zero >= 0 && w.zero <= 255, "weight ", name, ": zero point ", w.zero, " is outside 0 to 255");
  const int64_t rows = w.codes.shape[0], cols = w.codes.shape[1];
  MAGA_REQUIRE(w.group > 0 && cols % w.group == 0, "weight ", name, ": groups of ", w.group, " do not divide ", cols, " columns");
  MAGA_REQUIRE(w.scale.dtype == DType::f32 && (w.offset.empty() || w.offset.dtype == DType::f32), "weight ", name,
               ": scales and offsets must be fp32");
  require_shape(spec, "scales", w.scale, {rows, cols / w.group});
  if (!w.offset.empty()) require_shape(spec, "offsets", w.offset, {rows, cols / w.group});

  const bool whole_row = w.group == cols;
  if (!whole_row && w.group % 16 != 0) return pack_dense(spec, widen(w));

  PackedMatrix m;
  m.form = w.bits <= 4 ? Form::nibbles : Form::bytes;
  m.rows = rows;
  m.cols = cols;
  m.panels = divide_up(rows, kPanelRows);
  m.unit = whole_row || w.group % 32 == 0 ? 32 : 16;
  m.units = divide_up(cols, m.unit);
  m.group_units = whole_row ? m.units : w.group / m.unit;
  m.zero = w.zero;
  m.has_offset = !w.offset.empty();
  m.half_scales = fits_half(w.scale) && (!m.has_offset || fits_half(w.offset));
  const int64_t scale_bytes = round_up(cols / w.group * kPanelRows * (m.half_scales ? 2 : 4), kAlignment);
  m.offset_at = scale_bytes;
  m.codes_at = m.has_offset ? 2 * scale_bytes : scale_bytes;
  m.panel_bytes = m.codes_at + m.units * m.unit * kPanelRows / (m.form == Form::nibbles ? 2 : 1);

  auto storage = allocate_panels(m);
  pack_scales(w.scale, m, storage.get());
  if (m.has_offset) pack_scales(w.offset, m, storage.get() + m.offset_at);
  const uint8_t seen = pack_codes(w.codes.as<uint8_t>(), m, storage.get() + m.codes_at);
  MAGA_REQUIRE(seen >> w.bits == 0, "weight ", name, ": a code does not fit its ", w.bits, " bits");
  return finish(m, std::move(storage));
}

// There are no kernels for e4m3. As bf16 the weight takes half the memory of exact products and goes twice as fast; what that
// rounds (2^-9 of a value) is little beside what e4m3 has rounded (2^-4).
std::shared_ptr<const PackedWeight> pack_float8(const WeightSpec& spec, const Float8& w) {
  check(spec, w);
  const int64_t rows = w.codes.shape[0], cols = w.codes.shape[1];
  auto storage = allocate(rows * cols * 2);
  auto* values = reinterpret_cast<uint16_t*>(storage.get());
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c) values[r * cols + c] = float_to_bf16(value_at(w, r, c));
  const auto dense = pack_dense(spec, {storage.get(), DType::bf16, {rows, cols}, storage});
  return std::make_shared<const PackedWeight>(*dense, "the CPU has no kernels for fp8, and takes bf16");
}

template <typename T, typename Widen>
void unpack_dense(const std::byte* panel, int64_t lane, int64_t cols, float* out, Widen widen) {
  const T* values = reinterpret_cast<const T*>(panel) + lane;
  for (int64_t col = 0; col < cols; ++col) out[col] = widen(values[col * kPanelRows]);
}

}  // namespace

std::shared_ptr<const PackedWeight> pack_matrix(const WeightSpec& spec, const Canonical& weight) {
  const auto* dense = std::get_if<Dense>(&weight);
  const auto* affine = std::get_if<Affine>(&weight);
  const Tensor& values = dense ? dense->values : affine ? affine->codes : std::get<Float8>(weight).codes;
  MAGA_REQUIRE(values.shape.size() == 2 && values.elements() > 0, "weight ", spec.name, ": a matrix is needed, not shape ",
               shape_text(values.shape));
  require_shape(spec, dense ? "values" : "codes", values, spec.shape);
  if (dense) return pack_dense(spec, dense->values);
  return affine ? pack_affine(spec, *affine) : pack_float8(spec, std::get<Float8>(weight));
}

int64_t StackedWeight::bytes() const {
  int64_t bytes = 0;
  for (const auto& matrix : matrices_) bytes += matrix->bytes();
  return bytes;
}

void unpack_row(const PackedWeight& weight, int64_t row, float* out) {
  const PackedMatrix& m = weight.matrix();
  MAGA_CHECK(row >= 0 && row < m.rows, "row ", row, " of ", m.rows);
  const std::byte* panel = m.data + row / kPanelRows * m.panel_bytes;
  const int64_t lane = row % kPanelRows;
  switch (m.form) {
    case Form::f32: return unpack_dense<float>(panel, lane, m.cols, out, [](float v) { return v; });
    case Form::f16: return unpack_dense<uint16_t>(panel, lane, m.cols, out, f16_to_float);
    case Form::bf16: return unpack_dense<uint16_t>(panel, lane, m.cols, out, bf16_to_float);
    case Form::nibbles:
    case Form::bytes: break;
  }
  const auto scale_at = [&](const std::byte* part, int64_t group) {
    const int64_t i = group * kPanelRows + lane;
    return m.half_scales ? f16_to_float(reinterpret_cast<const uint16_t*>(part)[i]) : reinterpret_cast<const float*>(part)[i];
  };
  const auto* codes = reinterpret_cast<const uint8_t*>(panel + m.codes_at) + lane * 4;
  const int64_t group_cols = m.group_units * m.unit;
  for (int64_t begin = 0, group = 0; begin < m.cols; begin += group_cols, ++group) {
    const float scale = scale_at(panel, group), offset = m.has_offset ? scale_at(panel + m.offset_at, group) : 0.0f;
    for (int64_t col = begin; col < std::min(begin + group_cols, m.cols); ++col) {
      const int code = m.form == Form::bytes ? codes[col / 4 * kPanelRows * 4 + col % 4]
                                             : codes[col / 8 * kPanelRows * 4 + col % 4] >> (col % 8 < 4 ? 0 : 4) & 15;
      const float value = scale * static_cast<float>(code - m.zero);
      out[col] = m.has_offset ? value + offset : value;
    }
  }
}

}  // namespace maga::cpu
