// The attention kernel, written once over Vec. Included inside an unnamed namespace after vec_math.inl.

constexpr int64_t kVecsPerBlock = kBlockTokens / kLanes;
static_assert(kTileRows <= kMaxTileRows);
constexpr int kDirectRows = 12;      // up to here rows widen K/V as they read it; more pay for a copy in fp32
constexpr float kLowest = -3.0e38f;  // the maximum of no scores: finite, so that differences are never NaN

inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }

// sums[r][j] += sum over i < depth of a[r, i] * b[j][i], one chain of fused multiply-adds an element: the order never depends on
// how rows and columns are tiled.
template <int M, int N, typename E>
inline void multiply_add(const float* a, int64_t a_stride, const E* const (&b)[N], int64_t b_stride, int64_t depth,
                         Vec (&sums)[M][N]) {
  for (int64_t i = 0; i < depth; ++i) {
    Vec row[N];
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j) row[j] = load(b[j] + i * b_stride);
#pragma GCC unroll 16
    for (int r = 0; r < M; ++r) {
      const Vec x = broadcast(a[r * a_stride + i]);
#pragma GCC unroll 16
      for (int j = 0; j < N; ++j) sums[r][j] = fma(x, row[j], sums[r][j]);
    }
  }
}

template <int M, int N>
inline void clear(Vec (&sums)[M][N]) {
#pragma GCC unroll 16
  for (int r = 0; r < M; ++r)
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j) sums[r][j] = broadcast(0);
}

template <int M, int N>
inline void store_all(const Vec (&sums)[M][N], float* out, int64_t stride) {
#pragma GCC unroll 16
  for (int r = 0; r < M; ++r)
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j) store(out + r * stride + j * kLanes, sums[r][j]);
}

// Blocks [begin, end) of one segment, by absolute number, as the kernel reads them: from the pages, or widened into scratch.
template <typename E>
struct SegmentBlocks {
  int64_t begin, end;
  const E* keys[kSegmentBlocks];    // each (head_dim, 16)
  const E* values[kSegmentBlocks];  // each (16, value_stride)
  int64_t head_dim, value_stride;   // 0: values are in the keys
  // Of codes: the scales of 16 keys, then of 16 values, and what all of them are to be multiplied with; 0: these are no codes.
  const BF16* scales[kSegmentBlocks];
  float unit;
};

// M rows against the keys [first, last) of a segment, within which each row sees [from[r], to[r]).
struct RowTile {
  const float* q;  // (M, head_dim), scaled
  int64_t from[kTileRows], to[kTileRows];
  int64_t first, last;
  // What changes scores after the product with the keys.
  float soft_cap;            // 0: none
  float slopes[kTileRows];   // ALiBi
  int64_t index[kTileRows];  // K/V index of each row's token
  const uint64_t* tree[kTileRows];
  int64_t first_new;
  bool edited;     // any of them
  float* scores;   // (kTileRows, kSegmentTokens)
  int64_t values;  // columns of `out`, whole vectors
  float* maxima;   // (M)
  float* sums;     // (M)
  float* out;      // (M, values)
};

template <int M, int N, typename E>
inline void score_vecs(const SegmentBlocks<E>& kv, const RowTile& t, int64_t block, int64_t vec) {
  const E* keys[N];
  for (int j = 0; j < N; ++j) keys[j] = kv.keys[block - kv.begin + (vec + j) / kVecsPerBlock] + (vec + j) % kVecsPerBlock * kLanes;
  Vec sums[M][N];
  clear(sums);
  multiply_add<M, N>(t.q, kv.head_dim, keys, kBlockTokens, kv.head_dim, sums);
  store_all(sums, t.scores + vec * kLanes, kSegmentTokens);
}

template <int M, int N, typename E>
inline void weigh_values(const SegmentBlocks<E>& kv, const RowTile& t, int64_t block, int64_t column) {
  Vec sums[M][N];
  clear(sums);
  const float* weights = t.scores;
  for (int64_t key = block * kBlockTokens; key < t.last; key += kBlockTokens, weights += kBlockTokens) {
    const E* values[N];
    for (int j = 0; j < N; ++j) values[j] = kv.values[key / kBlockTokens - kv.begin] + column + j * kLanes;
    // Past `last` lie tokens that no row sees, or stale memory: 0 * NaN must not enter the sum.
    multiply_add<M, N>(weights, kSegmentTokens, values, kv.value_stride, lesser(kBlockTokens, t.last - key), sums);
  }
  store_all(sums, t.out + column, t.values);
}

// What a row has for the keys of a tile, times their scales, or those of their values. A weight of 0 stays 0, for the scale may be
// stale memory.
template <bool kWeights, typename E>
inline void scale_columns(const SegmentBlocks<E>& kv, float* row, int64_t block, int64_t vecs) {
  for (int64_t i = 0; i < vecs; ++i) {
    const BF16* scales = kv.scales[block - kv.begin + i / kVecsPerBlock] + (kWeights ? kBlockTokens : 0);
    const Vec x = load(row + i * kLanes), y = x * (load(scales + i % kVecsPerBlock * kLanes) * broadcast(kv.unit));
    store(row + i * kLanes, kWeights ? zero_where_less(x, broadcast(1.1e-38f), y) : y);
  }
}

// Soft cap, ALiBi and tree. Scores are in units of log2(e).
inline void edit_scores(const RowTile& t, int r, int64_t first_key, int64_t vecs) {
  float* scores = t.scores + r * kSegmentTokens;
  if (t.soft_cap > 0) {
    // cap * tanh(s / cap) = cap - 2 cap / (exp(2 s / cap) + 1); exp overflows for nothing, being bounded
    const float cap = t.soft_cap * kLog2E;
    for (int64_t i = 0; i < vecs; ++i) {
      const Vec e = exp(load(scores + i * kLanes) * broadcast(2 / cap));
      store(scores + i * kLanes, broadcast(cap) - broadcast(2 * cap) / (e + broadcast(1)));
    }
  }
  if (t.slopes[r] != 0)
    for (int64_t i = 0; i < vecs * kLanes; ++i) scores[i] += t.slopes[r] * kLog2E * static_cast<float>(first_key + i - t.index[r]);
  if (t.tree[r])
    for (int64_t key = greater(first_key, t.first_new); key < lesser(first_key + vecs * kLanes, t.to[r]); ++key)
      if (!(*t.tree[r] >> (key - t.first_new) & 1)) scores[key - first_key] = -__builtin_inff();
}

// Scores to weights: 2^(score - maximum), 0 where a row does not see the key.
inline void soften(const RowTile& t, int r, int64_t first_key, int64_t vecs) {
  float* scores = t.scores + r * kSegmentTokens;
  Vec highest = broadcast(kLowest);
  for (int64_t i = 0; i < vecs; ++i) {
    const int64_t key = first_key + i * kLanes;
    Vec x = load(scores + i * kLanes);
    if (key < t.from[r] || key + kLanes > t.to[r]) {
      x = keep_lanes(x, t.from[r] - key, t.to[r] - key, broadcast(-__builtin_inff()));
      store(scores + i * kLanes, x);
    }
    highest = max_with(highest, x);
  }
  const float maximum = max_lanes(highest);
  Vec sum = broadcast(0);
  for (int64_t i = 0; i < vecs; ++i) {
    const Vec p = exp2(load(scores + i * kLanes) - broadcast(maximum));
    store(scores + i * kLanes, p);
    sum = sum + p;
  }
  t.maxima[r] = maximum;
  t.sums[r] = sum_lanes(sum);
}

template <int M, typename E>
void attend_tile(const SegmentBlocks<E>& kv, const RowTile& t) {
  constexpr int kWide = M * 4 <= kAccumulators ? 4 : 2;
  const int64_t block = t.first / kBlockTokens;
  const int64_t vecs = (t.last - block * kBlockTokens + kBlockTokens - 1) / kBlockTokens * kVecsPerBlock;
  int64_t v = 0;
  for (; v + kWide <= vecs; v += kWide) score_vecs<M, kWide>(kv, t, block, v);
  if constexpr (kWide == 4)
    for (; v + 2 <= vecs; v += 2) score_vecs<M, 2>(kv, t, block, v);
  for (; v < vecs; ++v) score_vecs<M, 1>(kv, t, block, v);

  for (int r = 0; r < M; ++r) {
    float* row = t.scores + r * kSegmentTokens;
    if (kv.unit != 0) scale_columns<false>(kv, row, block, vecs);
    if (t.edited) edit_scores(t, r, block * kBlockTokens, vecs);
    soften(t, r, block * kBlockTokens, vecs);
    if (kv.unit != 0) scale_columns<true>(kv, row, block, vecs);
  }

  int64_t c = 0;
  for (; c + kWide * kLanes <= t.values; c += kWide * kLanes) weigh_values<M, kWide>(kv, t, block, c);
  if constexpr (kWide == 4)
    for (; c + 2 * kLanes <= t.values; c += 2 * kLanes) weigh_values<M, 2>(kv, t, block, c);
  for (; c < t.values; c += kLanes) weigh_values<M, 1>(kv, t, block, c);
}

template <int M, typename E>
void attend_tile_of(int rows, const SegmentBlocks<E>& kv, const RowTile& t) {
  if constexpr (M > 1)
    if (rows < M) return attend_tile_of<M - 1>(rows, kv, t);
  attend_tile<M>(kv, t);
}

// The state of a row over the segments so far: softmax maximum, sum of weights, weighted values.
struct RowStates {
  float* maxima;  // (rows)
  float* sums;    // (rows)
  float* out;     // (rows, values)
  int64_t values;
};

// Brings the state of the next segment into that of the segments before it.
inline void merge_row(const RowStates& s, int64_t row, float maximum, float sum, const float* out) {
  const float highest = s.maxima[row] > maximum ? s.maxima[row] : maximum;
  const Vec before = exp2(broadcast(s.maxima[row] - highest)), now = exp2(broadcast(maximum - highest));
  float* to = s.out + row * s.values;
  for (int64_t c = 0; c < s.values; c += kLanes) store(to + c, fma(load(out + c), now, load(to + c) * before));
  float lanes[kLanes];
  store(lanes, fma(broadcast(sum), now, broadcast(s.sums[row]) * before));
  s.sums[row] = lanes[0];
  s.maxima[row] = highest;
}

// `sink`: a score that takes part in the sum alone, or null.
inline void finish_row(const RowStates& s, int64_t row, const float* sink, float* out, int64_t width) {
  Vec sum = broadcast(s.sums[row]);
  if (sink) sum = sum + exp2(broadcast(*sink * kLog2E - s.maxima[row]));
  const Vec inverse = broadcast(1.0f) / sum;
  const float* from = s.out + row * s.values;
  int64_t c = 0;
  for (; c + kLanes <= width; c += kLanes) store(out + c, load(from + c) * inverse);
  if (c < width) store_first(out + c, load(from + c) * inverse, static_cast<int>(width - c));
}

struct ItemScratch {
  float* q;          // (rows, head_dim), scaled by scale * log2(e)
  float* scores;     // (kTileRows, kSegmentTokens)
  float* tile_out;   // (kTileRows, values)
  RowStates states;  // of all rows
  float* keys;       // (kSegmentBlocks, head_dim, 16)
  float* values;     // (kSegmentBlocks, 16, values)
};

// Must stay within attention_scratch_floats.
inline ItemScratch carve(float* at, int64_t rows, int64_t head_dim, int64_t values) {
  ItemScratch s;
  const auto take = [&](int64_t floats) {
    float* taken = at;
    at += round_up(floats, 16);
    return taken;
  };
  s.q = take(rows * head_dim);
  s.scores = take(kTileRows * kSegmentTokens);
  s.tile_out = take(kTileRows * values);
  s.states = {take(rows), take(rows), take(rows * values), values};
  s.keys = take(kSegmentTokens * head_dim);
  s.values = take(kSegmentTokens * values);
  return s;
}

template <typename E>
void widen_segment(const SegmentBlocks<E>& from, int64_t v_dim, const ItemScratch& s, SegmentBlocks<float>& to) {
  to.begin = from.begin;
  to.end = from.end;
  to.head_dim = from.head_dim;
  to.value_stride = s.states.values;
  to.unit = from.unit;
  for (int64_t b = 0; b < from.end - from.begin; ++b) {
    float* keys = s.keys + b * from.head_dim * kBlockTokens;
    float* values = s.values + b * kBlockTokens * to.value_stride;
    for (int64_t i = 0; i < from.head_dim * kBlockTokens; i += kLanes) store(keys + i, load(from.keys[b] + i));
    to.keys[b] = keys;
    to.values[b] = values;
    if (from.unit != 0) to.scales[b] = from.scales[b];
    if (from.value_stride == 0) {  // in the keys, which lie the other way
      for (int64_t c = 0; c < v_dim; ++c)
        for (int64_t token = 0; token < kBlockTokens; ++token) values[token * to.value_stride + c] = keys[c * kBlockTokens + token];
      continue;
    }
    for (int64_t token = 0; token < kBlockTokens; ++token)
      for (int64_t c = 0; c < v_dim; c += kLanes)
        store(values + token * to.value_stride + c, load(from.values[b] + token * from.value_stride + c));
  }
}

// All rows of an item against one segment.
template <typename E>
void attend_segment(const AttentionShape& shape, const AttentionItem& item, const SegmentBlocks<E>& kv, const ItemScratch& s,
                    bool initial) {
  const int64_t rows = item.tokens * shape.group;
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  float maxima[kTileRows], sums[kTileRows];
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t row = tile * rows / tiles;
    const int count = static_cast<int>((tile + 1) * rows / tiles - row);
    RowTile t;
    for (int r = 0; r < count; ++r) {
      const int64_t token = (row + r) / shape.group, head = item.kv_head * shape.group + (row + r) % shape.group;
      t.index[r] = item.first_key + token;
      t.from[r] = shape.window ? greater(0, t.index[r] + 1 - shape.window) : 0;
      t.tree[r] = item.tree ? item.tree + token : nullptr;
      // Of the tokens that its sequence brings, a token of a tree sees up to the last whose bit is set.
      t.to[r] = item.tree ? item.first_new + 64 - __builtin_clzll(item.tree[token] | 1) : greater(t.index[r] + 1, item.context);
      t.slopes[r] = shape.slopes ? shape.slopes[head] : 0;
    }
    t.soft_cap = shape.soft_cap;
    t.first_new = item.first_new;
    t.edited = shape.soft_cap > 0 || shape.slopes || item.tree;
    t.first = greater(t.from[0], kv.begin * kBlockTokens);
    t.last = t.to[0];
    for (int r = 1; r < count; ++r) t.last = greater(t.last, t.to[r]);
    t.last = lesser(t.last, kv.end * kBlockTokens);
    t.q = s.q + row * kv.head_dim;
    t.scores = s.scores;
    t.values = s.states.values;
    t.maxima = initial ? s.states.maxima + row : maxima;
    t.sums = initial ? s.states.sums + row : sums;
    t.out = initial ? s.states.out + row * t.values : s.tile_out;
    if (t.first < t.last) {
      attend_tile_of<kTileRows>(count, kv, t);
      if (!initial)
        for (int r = 0; r < count; ++r) merge_row(s.states, row + r, maxima[r], sums[r], s.tile_out + r * t.values);
    } else if (initial) {
      for (int r = 0; r < count; ++r) {
        t.maxima[r] = kLowest;
        t.sums[r] = 0;
      }
      for (int64_t i = 0; i < count * t.values; i += kLanes) store(t.out + i, broadcast(0));
    }
  }
}

template <typename E>
void attend_as(const AttentionShape& shape, const AttentionItem& item, float* scratch) {
  const KvLayer& layer = shape.layer;
  const int64_t rows = item.tokens * shape.group;
  const ItemScratch s = carve(scratch, rows, layer.head_dim, (layer.v_dim + kLanes - 1) / kLanes * kLanes);
  for (int64_t row = 0; row < rows; ++row) {
    const float* from = item.q + row / shape.group * item.q_stride + row % shape.group * layer.head_dim;
    for (int64_t i = 0; i < layer.head_dim; ++i) s.q[row * layer.head_dim + i] = from[i] * (shape.scale * kLog2E);
  }

  int64_t keys = greater(item.first_key + item.tokens, item.context);  // the end of those that any row sees
  if (item.tree)
    for (int64_t i = 0; i < item.tokens; ++i) keys = greater(keys, item.first_new + 64 - __builtin_clzll(item.tree[i] | 1));
  const int64_t oldest = shape.window ? greater(0, item.first_key + 1 - shape.window) : 0;
  for (int64_t segment = item.segment_begin; segment < item.segment_end; ++segment) {
    SegmentBlocks<E> kv;
    kv.begin = greater(segment * kSegmentTokens, oldest) / kBlockTokens;
    kv.end = (lesser((segment + 1) * kSegmentTokens, keys) + kBlockTokens - 1) / kBlockTokens;
    kv.head_dim = layer.head_dim;
    kv.value_stride = layer.values_in_keys ? 0 : layer.v_dim;
    kv.unit = 0;
    if constexpr (kCoded<E>) kv.unit = E::kUnit;
    for (int64_t b = kv.begin; b < kv.end; ++b) {
      const int64_t page = item.pages[b / layer.blocks_per_page] * layer.page_bytes;
      const E* block = reinterpret_cast<const E*>(kv_block(layer, page, item.kv_head, b % layer.blocks_per_page));
      kv.keys[b - kv.begin] = block;
      kv.values[b - kv.begin] = block + layer.head_dim * kBlockTokens;
      if constexpr (kCoded<E>) kv.scales[b - kv.begin] = kv_scales(layer, block);
    }
    const bool initial = segment == item.segment_begin;
    if (layer.values_in_keys || (sizeof(E) < sizeof(float) && rows > kDirectRows)) {
      SegmentBlocks<float> wide;
      widen_segment(kv, layer.v_dim, s, wide);
      attend_segment(shape, item, wide, s, initial);
    } else {
      attend_segment(shape, item, kv, s, initial);
    }
  }

  if (item.partial) {
    float* to = item.partial;
    const int64_t stride = round_up(layer.v_dim, 16);
    for (int64_t row = 0; row < rows; ++row) to[row] = s.states.maxima[row], to[rows + row] = s.states.sums[row];
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t c = 0; c < s.states.values; c += kLanes)
        store(to + 2 * rows + row * stride + c, load(s.states.out + row * s.states.values + c));
    return;
  }
  for (int64_t row = 0; row < rows; ++row)
    finish_row(s.states, row, shape.sinks ? shape.sinks + item.kv_head * shape.group + row % shape.group : nullptr,
               item.out + row / shape.group * item.out_stride + row % shape.group * layer.v_dim, layer.v_dim);
}

void attend(const AttentionShape& shape, const AttentionItem& item, float* scratch) {
  switch (shape.layer.dtype) {
    case DType::f16: return attend_as<F16>(shape, item, scratch);
    case DType::bf16: return attend_as<BF16>(shape, item, scratch);
    case DType::i8: return attend_as<I8>(shape, item, scratch);
    case DType::f8_e4m3: return attend_as<E4M3>(shape, item, scratch);
    case DType::f8_e5m2: return attend_as<E5M2>(shape, item, scratch);
    default: return attend_as<float>(shape, item, scratch);
  }
}

void merge(const AttentionMerge& m) {
  const int64_t rows = m.tokens * m.group, stride = round_up(m.v_dim, 16), size = partial_floats(rows, m.v_dim);
  const RowStates states{m.partials, m.partials + rows, m.partials + 2 * rows, stride};
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t segment = 1; segment < m.segments; ++segment) {
      const float* p = m.partials + segment * size;
      merge_row(states, row, p[row], p[rows + row], p + 2 * rows + row * stride);
    }
    finish_row(states, row, m.sinks ? m.sinks + row % m.group : nullptr,
               m.out + row / m.group * m.out_stride + row % m.group * m.v_dim, m.v_dim);
  }
}

constexpr AttentionKernels kTable{attend, merge};
