// Drives tile kernels over a range of blocks and tiles, and finishes each block of outputs: bias, gated activation, residual.
// Included in the anonymous namespace of one instruction set, after vec_math.inl (see linear_generic.cpp for what else it asks
// for).

constexpr int kVectors = kPanelRows / kLanes;  // vectors that span a panel's rows
constexpr int64_t kGroupTokens = 96;           // tokens that share one dequantisation of a panel
constexpr int kMostPanels = 3;                 // panels that feed one block of outputs

// Tile kernels exist for these counts; a last tile of another count runs as the next larger one, its surplus tokens zero.
constexpr int kTileCounts[] = {1, 2, 3, 4, 6, 8, 12, 16};

int tile_count(int64_t tokens) {
  int i = 0;
  while (kTileCounts[i] < tokens) ++i;
  return kTileCounts[i];
}

template <int n>
struct Count {
  static constexpr int value = n;
};

// Calls use(Count<count>), for the counts that a tile of at most `kTile` tokens can have.
template <int kTile, typename Use>
inline void with_count(int count, Use&& use) {
  const auto offer = [&]<int n>(Count<n> candidate) {
    if constexpr (n <= kTile)
      if (n == count) use(candidate);
  };
  offer(Count<1>{}), offer(Count<2>{}), offer(Count<3>{}), offer(Count<4>{});
  offer(Count<6>{}), offer(Count<8>{}), offer(Count<12>{}), offer(Count<16>{});
}

// Into the second-level cache. While a kernel works on one panel it asks for the next: left to the processor's own prefetching,
// which stops at page ends, a decode step took twice as long.
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

inline Vec load_scale(const std::byte* scales, int lane, bool half) {
  return half ? load(reinterpret_cast<const F16*>(scales) + lane) : load(reinterpret_cast<const float*>(scales) + lane);
}

// The sums of one tile: per token, `stride` floats, of which each panel takes 16.
struct TileSums {
  float* data;
  int64_t stride;
};

// The panels that one block of 16 outputs needs. When half the rows are no multiple of 16, the up rows straddle two panels.
struct BlockPanels {
  const std::byte* panels[kMostPanels];
  int count;
  int64_t up_at;  // where the up sums begin
};

BlockPanels panels_of(const LinearTask& task, int64_t block) {
  const PackedMatrix& w = *task.weight;
  BlockPanels result{{w.data + block * w.panel_bytes, nullptr, nullptr}, 1, 0};
  if (!task.gated) return result;
  const int64_t up_row = w.rows / 2 + block * kPanelRows;
  const int64_t first = up_row / kPanelRows;
  result.up_at = kPanelRows + up_row % kPanelRows;
  for (int64_t panel = first; panel < w.panels && panel < first + (up_row % kPanelRows ? 2 : 1); ++panel)
    result.panels[result.count++] = w.data + panel * w.panel_bytes;
  return result;
}

// Copies the `count` floats that exist; the rest of the block is zero. Null: all zero.
void copy_block(const float* from, int64_t count, float* to) {
  for (int64_t i = 0; i < kPanelRows; ++i) to[i] = from && i < count ? from[i] : 0.0f;
}

void finish_block(const LinearTask& task, int64_t block, int64_t first_token, int64_t tokens, TileSums sums, int64_t up_at) {
  const int64_t outputs = task.gated ? task.weight->rows / 2 : task.weight->rows;
  const int64_t at = block * kPanelRows;
  const int64_t width = outputs - at < kPanelRows ? outputs - at : kPanelRows;
  alignas(64) float bias[kPanelRows], up_bias[kPanelRows], edge[kPanelRows];
  if (task.bias) {
    copy_block(task.bias + at, width, bias);
    if (task.gated) copy_block(task.bias + outputs + at, width, up_bias);
  }
  for (int64_t m = 0; m < tokens; ++m) {
    const float* row = sums.data + m * sums.stride;
    float* out = task.out + (first_token + m) * task.out_stride + at;
    const float* residual = task.residual ? task.residual + (first_token + m) * task.residual_stride + at : nullptr;
    if (residual && width < kPanelRows) {
      copy_block(residual, width, edge);
      residual = edge;
    }
    float* to = width < kPanelRows ? edge : out;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const int lane = v * kLanes;
      Vec value = load(row + lane);
      if (task.bias) value = value + load(bias + lane);
      if (task.gated) {
        Vec up = load(row + up_at + lane);
        if (task.bias) up = up + load(up_bias + lane);
        value = activate(task.activation, value) * up;
      }
      if (residual) value = value + load(residual + lane);
      store(to + lane, value);
    }
    if (width < kPanelRows)
      for (int64_t i = 0; i < width; ++i) out[i] = edge[i];
  }
}
