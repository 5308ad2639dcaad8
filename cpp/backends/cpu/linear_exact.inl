// fp32 matrix kernels: weights widened or dequantised to fp32, one fused multiply-add per product, columns in rising order.
// Codes are dequantised in registers for one tile of tokens, and into a small buffer for more; both give the same values.
// Included in the anonymous namespace of one instruction set, after linear_run.inl.

constexpr int64_t kChunk = 256;  // columns of a panel that are worked on at once, so that they stay in the first-level cache

// Dense matrices have no units: their columns are not filled up.
int64_t filled_cols(const PackedMatrix& w) { return w.unit ? w.units * w.unit : w.cols; }

// Tokens [range) into tiles: [column][token of the tile].
void prepare_exact(const PackedMatrix& w, const float* x, int64_t x_stride, int64_t tokens, Range range, std::byte* out) {
  const int64_t cols = filled_cols(w);
  for (int64_t token = range.begin; token < range.end; ++token) {
    const int64_t first = token / kExactTile * kExactTile;
    const int count = tile_count(tokens - first < kExactTile ? tokens - first : kExactTile);
    float* tile = reinterpret_cast<float*>(out) + first * cols;
    const float* row = x + token * x_stride;
    for (int64_t col = 0; col < cols; ++col) tile[col * count + token - first] = col < w.cols ? row[col] : 0.0f;
    if (token == tokens - 1)
      for (int64_t col = 0; col < cols; ++col)
        for (int64_t m = token + 1 - first; m < count; ++m) tile[col * count + m] = 0.0f;
  }
}

template <int kPanels, int kTokens>
struct Accumulators {
  static constexpr int kRows = kPanels * kVectors;  // vectors of rows
  Vec acc[kRows][kTokens];

  inline void begin(bool resume, TileSums sums) {
#pragma GCC unroll 4
    for (int v = 0; v < kRows; ++v)
#pragma GCC unroll 16
      for (int m = 0; m < kTokens; ++m) acc[v][m] = resume ? load(sums.data + m * sums.stride + v * kLanes) : broadcast(0.0f);
  }
  // x: this column's activations, one per token
  inline void add_column(const Vec (&w)[kRows], const float* x) {
#pragma GCC unroll 16
    for (int m = 0; m < kTokens; ++m) {
      const Vec activation = broadcast(x[m]);
#pragma GCC unroll 4
      for (int v = 0; v < kRows; ++v) acc[v][m] = fma(w[v], activation, acc[v][m]);
    }
  }
  inline void end(TileSums sums) const {
#pragma GCC unroll 4
    for (int v = 0; v < kRows; ++v)
#pragma GCC unroll 16
      for (int m = 0; m < kTokens; ++m) store(sums.data + m * sums.stride + v * kLanes, acc[v][m]);
  }
};

// `values`: one pointer a panel. Two panels share each broadcast activation where the registers allow it. `next`: bytes from here
// to the values to prefetch.
template <typename T, int kPanels, int kTokens>
void dense_tile(const void* const* values, int64_t cols, const float* x, bool resume, TileSums sums, int64_t next) {
  const T* row[kPanels];
  for (int p = 0; p < kPanels; ++p) row[p] = static_cast<const T*>(values[p]);
  Accumulators<kPanels, kTokens> a;
  a.begin(resume, sums);
  for (int64_t col = 0; col < cols; ++col, x += kTokens) {
    Vec w[kPanels * kVectors];
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
      prefetch(reinterpret_cast<const std::byte*>(row[p] + col * kPanelRows) + next);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) w[p * kVectors + v] = load(row[p] + col * kPanelRows + v * kLanes);
    }
    a.add_column(w, x);
  }
  a.end(sums);
}

// Calls take(column, weights of the panel's 16 rows) for the columns [begin, end), both multiples of a unit.
template <class Codes, typename Take>
[[gnu::always_inline]] inline void dequantize(const PackedMatrix& w, const std::byte* panel, int64_t begin, int64_t end,
                                              Take&& take) {
  const int64_t scale_bytes = w.half_scales ? 2 : 4;
  for (int64_t col = begin; col < end; col += w.unit) {
    const int64_t group = col / w.unit / w.group_units * kPanelRows;
    Vec scale[kVectors], base[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      scale[v] = load_scale(panel + group * scale_bytes, v * kLanes, w.half_scales);
      const Vec offset =
          w.has_offset ? load_scale(panel + w.offset_at + group * scale_bytes, v * kLanes, w.half_scales) : broadcast(0.0f);
      base[v] = fma(scale[v], broadcast(static_cast<float>(-w.zero)), offset);
    }
    const std::byte* codes = panel + w.codes_at + col / Codes::kColumns * kPanelRows * 4;
    for (int64_t step = 0; step < w.unit; step += Codes::kColumns, codes += kPanelRows * 4) {
      prefetch(codes + w.panel_bytes);
      Ints words[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) words[v] = load_words(codes + v * kLanes * 4);
#pragma GCC unroll 8
      for (int i = 0; i < Codes::kColumns; ++i) {
        Vec values[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          const Ints code = bits_of(words[v], i % 4 * 8 + i / 4 * 4, Codes::kColumns == 8 ? 15 : 255);
          values[v] = fma(scale[v], to_float(code), base[v]);
        }
        take(col + step + i, values);
      }
    }
  }
}

template <class Codes, int kTokens>
void codes_tile(const PackedMatrix& w, const std::byte* panel, const float* x, TileSums sums) {
  Accumulators<1, kTokens> a;
  a.begin(false, sums);
  dequantize<Codes>(w, panel, 0, filled_cols(w),
                    [&](int64_t col, const Vec(&values)[kVectors]) { a.add_column(values, x + col * kTokens); });
  a.end(sums);
}

template <int kPanels>
void dense_tile_for(Form form, int count, const void* const* values, int64_t cols, const float* x, bool resume, TileSums sums,
                    int64_t next) {
  with_count<kExactTile>(count, [&](auto c) {
    switch (form) {
      case Form::f16: return dense_tile<F16, kPanels, c.value>(values, cols, x, resume, sums, next);
      case Form::bf16: return dense_tile<BF16, kPanels, c.value>(values, cols, x, resume, sums, next);
      default: return dense_tile<float, kPanels, c.value>(values, cols, x, resume, sums, next);
    }
  });
}

void codes_tile_for(int count, const PackedMatrix& w, const std::byte* panel, const float* x, TileSums sums) {
  with_count<kExactTile>(count, [&](auto c) {
    if (w.form == Form::nibbles) return codes_tile<Nibbles, c.value>(w, panel, x, sums);
    return codes_tile<Bytes, c.value>(w, panel, x, sums);
  });
}

void dequantize_chunk(const PackedMatrix& w, const std::byte* panel, int64_t begin, int64_t end, float* out) {
  const auto put = [&](int64_t col, const Vec(&values)[kVectors]) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(out + (col - begin) * kPanelRows + v * kLanes, values[v]);
  };
  if (w.form == Form::nibbles) return dequantize<Nibbles>(w, panel, begin, end, put);
  dequantize<Bytes>(w, panel, begin, end, put);
}

int tile_count_at(const LinearTask& task, int64_t tile) {
  const int64_t left = task.tokens - tile * kExactTile;
  return tile_count(left < kExactTile ? left : kExactTile);
}

// kPanels panels times the tiles [range), at most kGroupTokens tokens, whose sums lie one after another.
template <int kPanels>
void exact_panels(const LinearTask& task, const std::byte* const* panels, Range tiles, TileSums sums) {
  const PackedMatrix& w = *task.weight;
  const int64_t cols = filled_cols(w);
  const auto* x = reinterpret_cast<const float*>(task.activations);
  const int64_t value_bytes = w.form == Form::f32 ? 4 : 2;
  const int64_t next = w.unit ? 0 : kPanels * w.panel_bytes;
  alignas(64) float chunk[kPanels][kChunk * kPanelRows];
  for (int64_t begin = 0; begin < cols; begin += kChunk) {
    const int64_t end = begin + kChunk < cols ? begin + kChunk : cols;
    const void* values[kPanels];
    for (int p = 0; p < kPanels; ++p) {
      values[p] = w.unit ? static_cast<const void*>(chunk[p]) : panels[p] + begin * kPanelRows * value_bytes;
      if (w.unit) dequantize_chunk(w, panels[p], begin, end, chunk[p]);
    }
    for (int64_t t = tiles.begin; t < tiles.end; ++t) {
      const int count = tile_count_at(task, t);
      const int64_t first = t * kExactTile;
      dense_tile_for<kPanels>(w.form, count, values, end - begin, x + first * cols + begin * count, begin > 0,
                              {sums.data + (first - tiles.begin * kExactTile) * sums.stride, sums.stride}, next);
    }
  }
}

void exact_block(const LinearTask& task, const BlockPanels& needed, Range tiles, TileSums sums) {
  const PackedMatrix& w = *task.weight;
  for (int i = 0; i < needed.count; ++i) {
    const TileSums at{sums.data + i * kPanelRows, sums.stride};
    if (w.unit && tiles.end - tiles.begin == 1) {
      const auto* x = reinterpret_cast<const float*>(task.activations) + tiles.begin * kExactTile * filled_cols(w);
      codes_tile_for(tile_count_at(task, tiles.begin), w, needed.panels[i], x, at);
      continue;
    }
    if constexpr (kExactPanels == 2)
      if (i + 1 < needed.count) {
        exact_panels<2>(task, needed.panels + i, tiles, at);
        ++i;
        continue;
      }
    exact_panels<1>(task, needed.panels + i, tiles, at);
  }
}

void run_exact(const LinearTask& task, Range blocks, Range tiles) {
  constexpr int64_t kGroupTiles = kGroupTokens / kExactTile;
  alignas(64) float buffer[kGroupTokens * kMostPanels * kPanelRows];
  const TileSums sums{buffer, task.gated ? kMostPanels * kPanelRows : kExactPanels * kPanelRows};
  const int64_t step = task.gated ? 1 : kExactPanels;  // blocks at once
  for (int64_t begin = tiles.begin; begin < tiles.end; begin += kGroupTiles) {
    const Range group{begin, begin + kGroupTiles < tiles.end ? begin + kGroupTiles : tiles.end};
    const int64_t first = group.begin * kExactTile;
    const int64_t end = group.end * kExactTile < task.tokens ? group.end * kExactTile : task.tokens;
    for (int64_t block = blocks.begin; block < blocks.end; block += step) {
      BlockPanels needed = panels_of(task, block);
      const int64_t count = step < blocks.end - block ? step : blocks.end - block;
      for (int64_t i = 1; i < count; ++i) needed.panels[needed.count++] = panels_of(task, block + i).panels[0];
      exact_block(task, needed, group, sums);
      for (int64_t i = 0; i < count; ++i)
        finish_block(task, block + i, first, end - first, {sums.data + i * kPanelRows, sums.stride}, needed.up_at);
    }
  }
}
