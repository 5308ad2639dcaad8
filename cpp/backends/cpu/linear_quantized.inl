// Integer matrix kernels: activations as int8 per unit, codes as they are, one fp32 accumulation per unit. The integer sums are
// exact and the order over units is fixed, so a token's result depends neither on the tile nor on the instruction set's width.
// Included in the anonymous namespace of one instruction set, after linear_run.inl.

template <int kUnit>
struct Block {
  int8_t codes[kUnit];
  float scale;    // x = scale * code
  float sum;      // scale * (sum of codes), for the weight's offset
  int32_t start;  // -zero * (sum of codes), where the integer sum starts
  int32_t unused;
};

template <int kUnit>
void quantize_block(const float* values, int32_t zero, Block<kUnit>& block) {
  // As integers the magnitudes order like floats, and infinity and NaN come out on top: they must reach the result.
  int32_t top = 0;
  for (int i = 0; i < kUnit; ++i) {
    const int32_t magnitude = __builtin_bit_cast(int32_t, values[i]) & 0x7fffffff;
    top = magnitude > top ? magnitude : top;
  }
  const float largest = __builtin_bit_cast(float, top);
  const float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f;
  uint32_t sum = 0;  // unsigned, because the codes of NaN may overflow it
  int32_t rounded[kUnit];
  for (int i = 0; i < kUnit; ++i) {
    // Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits.
    rounded[i] = __builtin_bit_cast(int32_t, values[i] * inverse + 12582912.0f) - 0x4B400000;
    sum += static_cast<uint32_t>(rounded[i]);
  }
  for (int i = 0; i < kUnit; ++i) block.codes[i] = static_cast<int8_t>(rounded[i]);
  block.scale = largest / 127.0f;
  block.sum = block.scale * static_cast<float>(static_cast<int32_t>(sum));
  block.start = static_cast<int32_t>(-static_cast<uint32_t>(zero) * sum);
  block.unused = 0;
}

// Tokens [range) into tiles: [unit][token of the tile].
template <int kUnit>
void quantize_tokens(const PackedMatrix& w, const float* x, int64_t x_stride, int64_t tokens, Range range, std::byte* out) {
  const int32_t zero = w.zero - (w.form == Form::bytes ? kByteBias : 0);
  for (int64_t token = range.begin; token < range.end; ++token) {
    const int64_t first = token / kQuantizedTile * kQuantizedTile;
    const int count = tile_count(tokens - first < kQuantizedTile ? tokens - first : kQuantizedTile);
    auto* tile = reinterpret_cast<Block<kUnit>*>(out) + first * w.units;
    const float* row = x + token * x_stride;
    const int64_t whole = w.cols / kUnit;
    for (int64_t u = 0; u < whole; ++u) quantize_block(row + u * kUnit, zero, tile[u * count + token - first]);
    if (whole < w.units) {
      float values[kUnit] = {};
      for (int64_t i = whole * kUnit; i < w.cols; ++i) values[i - whole * kUnit] = row[i];
      quantize_block(values, zero, tile[whole * count + token - first]);
    }
    if (token == tokens - 1)
      for (int64_t u = 0; u < w.units; ++u)
        for (int64_t m = token + 1 - first; m < count; ++m) tile[u * count + m] = Block<kUnit>{};
  }
}

void prepare_quantized(const PackedMatrix& w, const float* x, int64_t x_stride, int64_t tokens, Range range, std::byte* out) {
  (w.unit == 32 ? quantize_tokens<32> : quantize_tokens<16>)(w, x, x_stride, tokens, range, out);
}

template <class Codes, int kUnit, int kTokens>
void quantized_tile(const PackedMatrix& w, const std::byte* panel, const std::byte* activations, TileSums sums) {
  constexpr int kSteps = kUnit / Codes::kColumns;
  constexpr int kAtOnce = kTokens < Codes::kTokensAtOnce ? kTokens : Codes::kTokensAtOnce;
  const auto* blocks = reinterpret_cast<const Block<kUnit>*>(activations);
  const auto* codes = reinterpret_cast<const uint8_t*>(panel + w.codes_at);
  const int64_t scale_step = kPanelRows * (w.half_scales ? 2 : 4);
  const std::byte* scales = panel;
  const std::byte* offsets = panel + w.offset_at;
  const bool half_scales = w.half_scales, has_offset = w.has_offset;
  const int64_t units = w.units, group_units = w.group_units, panel_bytes = w.panel_bytes;
  Vec acc[kVectors][kTokens];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 16
    for (int m = 0; m < kTokens; ++m) acc[v][m] = broadcast(0.0f);

  int64_t left = group_units;
  for (int64_t u = 0; u < units; ++u, blocks += kTokens, codes += kSteps * kPanelRows * 4) {
    Codes c[kSteps][kVectors];
    Vec scale[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      scale[v] = load_scale(scales, v * kLanes, half_scales);
#pragma GCC unroll 8
      for (int s = 0; s < kSteps; ++s) c[s][v] = Codes::load(codes + (s * kPanelRows + v * kLanes) * 4);
    }
    // The same unit of the next panel.
#pragma GCC unroll 8
    for (int s = 0; s < kSteps; ++s) prefetch(codes + s * kPanelRows * 4 + panel_bytes);
    prefetch(scales + panel_bytes);
#pragma GCC unroll 16
    for (int first = 0; first < kTokens; first += kAtOnce) {
      typename Codes::Sum sum[kVectors][kAtOnce];
#pragma GCC unroll 16
      for (int m = 0; m < kAtOnce; ++m)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
          if (first + m < kTokens) sum[v][m].begin(blocks[first + m].start);
#pragma GCC unroll 8
      for (int s = 0; s < kSteps; ++s)
#pragma GCC unroll 16
        for (int m = 0; m < kAtOnce; ++m)
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v)
            if (first + m < kTokens) sum[v][m].add(c[s][v], blocks[first + m].codes + s * Codes::kColumns);
#pragma GCC unroll 16
      for (int m = 0; m < kAtOnce; ++m)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
          if (first + m < kTokens) {
            const Vec products = to_float(sum[v][m].total(blocks[first + m].start));
            acc[v][first + m] = fma(products, scale[v] * broadcast(blocks[first + m].scale), acc[v][first + m]);
          }
    }
    if (has_offset)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const Vec offset = load_scale(offsets, v * kLanes, half_scales);
#pragma GCC unroll 16
        for (int m = 0; m < kTokens; ++m) acc[v][m] = fma(offset, broadcast(blocks[m].sum), acc[v][m]);
      }
    if (--left == 0) {
      left = group_units;
      scales += scale_step;
      offsets += scale_step;
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 16
    for (int m = 0; m < kTokens; ++m) store(sums.data + m * sums.stride + v * kLanes, acc[v][m]);
}

using QuantizedTile = void (*)(const PackedMatrix&, const std::byte* panel, const std::byte* activations, TileSums);

template <class Codes, int kUnit>
QuantizedTile quantized_tile_for(int count) {
  QuantizedTile tile = nullptr;
  with_count<kQuantizedTile>(count, [&](auto c) { tile = quantized_tile<Codes, kUnit, c.value>; });
  return tile;
}

void run_quantized(const LinearTask& task, Range blocks, Range tiles) {
  const PackedMatrix& w = *task.weight;
  const auto choose = w.form == Form::nibbles ? (w.unit == 32 ? quantized_tile_for<Nibbles, 32> : quantized_tile_for<Nibbles, 16>)
                                              : (w.unit == 32 ? quantized_tile_for<Bytes, 32> : quantized_tile_for<Bytes, 16>);
  const int64_t token_bytes = w.units * (w.unit == 32 ? sizeof(Block<32>) : sizeof(Block<16>));
  alignas(64) float buffer[kQuantizedTile * kMostPanels * kPanelRows];
  const TileSums sums{buffer, task.gated ? kMostPanels * kPanelRows : kPanelRows};
  for (int64_t t = tiles.begin; t < tiles.end; ++t) {
    const int64_t first = t * kQuantizedTile;
    const int64_t tokens = task.tokens - first < kQuantizedTile ? task.tokens - first : kQuantizedTile;
    const QuantizedTile tile = choose(tile_count(tokens));
    for (int64_t block = blocks.begin; block < blocks.end; ++block) {
      const BlockPanels needed = panels_of(task, block);
      for (int i = 0; i < needed.count; ++i)
        tile(w, needed.panels[i], task.activations + first * token_bytes, {sums.data + i * kPanelRows, sums.stride});
      finish_block(task, block, first, tokens, sums, needed.up_at);
    }
  }
}
