// Drives tile kernels over a range of blocks and tiles, and finishes each block of outputs: bias, gated activation, residual.
// Included in the anonymous namespace of one instruction set, after its vectors (see linear_generic.cpp for what they offer).

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

inline F load_scale(const std::byte* scales, int lane, bool half) {
  return half ? load_half(reinterpret_cast<const uint16_t*>(scales) + lane) : load(reinterpret_cast<const float*>(scales) + lane);
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

// e^x to about 1 ulp for -87 <= x <= 88, clamped to that range; NaN stays NaN.
inline F exponential(F x) {
  x = clamp(x, -87.0f, 88.0f);
  const I n = round_to_int(mul(x, set1(1.44269504f)));
  // Cody and Waite: ln 2 in two parts, the first with few enough bits that n times it is exact.
  F r = fma(to_float(n), set1(-0.693359375f), x);
  r = fma(to_float(n), set1(2.12194440e-4f), r);
  F p = set1(1.0f / 5040);
  p = fma(p, r, set1(1.0f / 720));
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(mul(p, r), r, r);
  return mul(add(p, set1(1.0f)), power_of_two(n));
}

// x / (1 + e^-y)
inline F times_sigmoid(F x, F y) { return divide(x, add(set1(1.0f), exponential(negate(y)))); }

constexpr int kTailTerms = 10;
constexpr float kTail[kTailTerms] = {0.0997440591f, 0.0995648280f, 0.0949326828f, 0.0746497735f,  0.0791662186f,
                                     0.0263829287f, 0.0122958040f, 0.0635600463f, -0.0677830949f, 0.0174867567f};

// x times the normal distribution function. With h = erfc(|x| / sqrt 2) / 2: x h for negative x, x - x h otherwise, so that the
// relative error stays small on both sides. h = e^(-x^2 / 2) w p(w), w = 1 / (1 + |x| / 4), p fitted to 1e-7.
inline F gelu(F x) {
  const F size = absolute(x);
  const F w = divide(set1(1.0f), fma(size, set1(0.25f), set1(1.0f)));
  F p = set1(kTail[kTailTerms - 1]);
#pragma GCC unroll 16
  for (int i = kTailTerms - 2; i >= 0; --i) p = fma(p, w, set1(kTail[i]));
  const F tail = mul(mul(mul(p, w), exponential(mul(mul(x, x), set1(-0.5f)))), x);
  return where_negative(x, tail, subtract(x, tail));
}

inline F activate(ActivationKind kind, F x) {
  switch (kind) {
    case ActivationKind::silu: return times_sigmoid(x, x);
    case ActivationKind::gelu: return gelu(x);
    // (1 + tanh u) / 2 = sigmoid(2 u)
    case ActivationKind::gelu_tanh: return times_sigmoid(x, mul(mul(x, set1(1.59576912f)), fma(mul(x, x), set1(0.044715f), set1(1.0f))));
    case ActivationKind::relu: return clamp(x, 0.0f, __builtin_inff());
  }
  return x;
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
      F value = load(row + lane);
      if (task.bias) value = add(value, load(bias + lane));
      if (task.gated) {
        F up = load(row + up_at + lane);
        if (task.bias) up = add(up, load(up_bias + lane));
        value = mul(activate(task.activation, value), up);
      }
      if (residual) value = add(value, load(residual + lane));
      store(to + lane, value);
    }
    if (width < kPanelRows)
      for (int64_t i = 0; i < width; ++i) out[i] = edge[i];
  }
}
