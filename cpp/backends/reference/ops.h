// The definition of every op: plain loops in double precision over whole rows. Slow and obvious on purpose.
#pragma once

#include <memory>
#include <vector>

#include "backends/backend.h"

namespace maga::reference {

// A weight with every element as the double it exactly stands for. A vector of n is (1, n), a stack of matrices lies one after
// another.
struct DoubleWeight : Weight {
  int64_t rows = 0, cols = 0;
  std::vector<double> elements;  // (rows, cols)

  int64_t bytes() const override { return static_cast<int64_t>(elements.size() * sizeof(double)); }
  double at(int64_t row, int64_t col) const { return elements[row * cols + col]; }
};

// Columns of a value.
struct Columns {
  double* first = nullptr;  // row 0, first column
  int64_t stride = 0;       // from row to row
  int64_t width = 0;

  double& at(int64_t row, int64_t col) const { return first[row * stride + col]; }
  double* row(int64_t row) const { return width > 0 ? first + row * stride : nullptr; }
  Columns part(int64_t offset, int64_t columns) const { return {first + offset, stride, columns}; }
};

// Keys and values of one layer, in pages.
struct LayerPages {
  CacheLayer shape;
  DType dtype = DType::f32;  // 8-bit codes: numbers are rounded as those and their scales round; other types: they are not
  int64_t page_tokens = 0;
  std::vector<double> keys;    // (pages, page_tokens, kv_heads, head_dim)
  std::vector<double> values;  // (pages, page_tokens, kv_heads, v_dim), or empty: in the keys

  double* key(int32_t page, int64_t slot) { return &keys[(page * page_tokens + slot) * shape.kv_heads * shape.head_dim]; }
  double* value(int32_t page, int64_t slot) { return &values[(page * page_tokens + slot) * shape.kv_heads * shape.v_dim]; }
  double* value(int32_t page, int64_t slot, int64_t head) {
    return shape.values_in_keys ? key(page, slot) + head * shape.head_dim : value(page, slot) + head * shape.v_dim;
  }

  // One token's, (kv_heads, head_dim) and (kv_heads, v_dim).
  void write(int32_t page, int64_t slot, const double* token_keys, const double* token_values);
};

struct Machine {
  Program program;
  std::vector<std::shared_ptr<const DoubleWeight>> weights;
  std::vector<std::vector<double>> values;  // by ValueId: (most rows, width)
  std::vector<LayerPages> layers;

  Columns columns(const View& view) {
    const int64_t width = program.values[view.value].width;
    return {values[view.value].data() + view.offset, width, view.width};
  }
  const DoubleWeight* weight(WeightId id) const { return id == kNone ? nullptr : weights[id].get(); }
};

void run(Machine& machine, const Op& op, const Step& step);

}  // namespace maga::reference
