// The row kernels, written once over Vec. Included inside an unnamed namespace after vec_math.inl.

template <typename Body>
inline void for_each_vec(int64_t width, Body body) {  // body(column, lanes)
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) body(i, kLanes);
  if (i < width) body(i, static_cast<int>(width - i));
}

inline Vec load_up_to(const float* p, int n) { return n == kLanes ? load(p) : load_first(p, n); }
inline void store_up_to(float* p, Vec x, int n) { n == kLanes ? store(p, x) : store_first(p, x, n); }

// Four sums side by side, so that the additions do not wait for each other.
template <typename Term>
inline float sum_over(int64_t width, Term term) {  // term(column, lanes), zero in the lanes past the end
  Vec sums[4] = {broadcast(0), broadcast(0), broadcast(0), broadcast(0)};
  int64_t i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) sums[j] = sums[j] + term(i + j * kLanes, kLanes);
  for (; i < width; i += kLanes) sums[0] = sums[0] + term(i, width - i < kLanes ? static_cast<int>(width - i) : kLanes);
  return sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

void norm_run(const NormRows& a, int64_t run, const float* x, float* y) {
  const float* weight = a.weight ? a.weight + run * a.own : nullptr;
  const float* bias = a.bias ? a.bias + run * a.own : nullptr;
  const float n = static_cast<float>(a.group);
  float mean = 0;
  if (a.kind == NormKind::layer) mean = sum_over(a.group, [&](int64_t i, int lanes) { return load_up_to(x + i, lanes); }) / n;
  const float squares = sum_over(a.group, [&](int64_t i, int lanes) {
    Vec d = load_up_to(x + i, lanes);
    if (a.kind == NormKind::layer) d = keep_lanes(d - broadcast(mean), 0, lanes, broadcast(0));
    return d * d;
  });
  const Vec inverse = broadcast(1.0f / __builtin_sqrtf(squares / n + a.eps));
  for_each_vec(a.group, [&](int64_t i, int lanes) {
    Vec d = load_up_to(x + i, lanes);
    if (a.kind == NormKind::layer) d = d - broadcast(mean);
    d = d * inverse;
    if (weight) d = d * (load_up_to(weight + i, lanes) + broadcast(a.weight_offset));
    if (bias) d = d + load_up_to(bias + i, lanes);
    store_up_to(y + i, d, lanes);
  });
}

void norm(const NormRows& a) {
  for (int64_t row = 0; row < a.rows; ++row)
    for (int64_t g = 0; g < a.groups; ++g)
      norm_run(a, g, a.in + row * a.in_stride + g * a.group, a.out + row * a.out_stride + g * a.group);
}

void activation(const ActivationRows& a) {
  for (int64_t row = 0; row < a.rows; ++row) {
    const float* gate = a.gate + row * a.gate_stride;
    const float* up = a.up ? a.up + row * a.up_stride : nullptr;
    float* out = a.out + row * a.out_stride;
    for_each_vec(a.width, [&](int64_t i, int lanes) {
      Vec y = activate(a.kind, load_up_to(gate + i, lanes));
      if (up) y = y * load_up_to(up + i, lanes);
      store_up_to(out + i, y, lanes);
    });
  }
}

void bound(const BoundRows& a) {
  const Vec limit = broadcast(a.limit), least = broadcast(-a.limit);
  for (int64_t row = 0; row < a.rows; ++row) {
    const float* in = a.in + row * a.in_stride;
    float* out = a.out + row * a.out_stride;
    for_each_vec(a.width, [&](int64_t i, int lanes) {
      const Vec x = load_up_to(in + i, lanes);
      const Vec y = a.kind == BoundKind::tanh ? limit * tanh(x / limit) : max_with(least, min_with(limit, x));
      store_up_to(out + i, y, lanes);
    });
  }
}

void add(const AddRows& a) {
  for (int64_t row = 0; row < a.rows; ++row) {
    const float* x = a.a + row * a.a_stride;
    const float* y = a.b + row * a.b_stride;
    float* out = a.out + row * a.out_stride;
    for_each_vec(a.width,
                 [&](int64_t i, int lanes) { store_up_to(out + i, load_up_to(x + i, lanes) + load_up_to(y + i, lanes), lanes); });
  }
}

void scale(float* x, float factor, int64_t count) {
  for_each_vec(count, [&](int64_t i, int lanes) { store_up_to(x + i, load_up_to(x + i, lanes) * broadcast(factor), lanes); });
}

inline void rotate_halves(float* x, const float* turn, int64_t half) {
  for_each_vec(half, [&](int64_t j, int lanes) {
    const Vec c = load_up_to(turn + j, lanes), s = load_up_to(turn + half + j, lanes);
    const Vec a = load_up_to(x + j, lanes), b = load_up_to(x + half + j, lanes);
    store_up_to(x + j, fma(a, c, -(b * s)), lanes);
    store_up_to(x + half + j, fma(b, c, a * s), lanes);
  });
}

inline void rotate_pairs(float* x, const float* turn, int64_t rotary_dim) {
  for_each_vec(rotary_dim, [&](int64_t j, int lanes) {  // an even number of lanes: pairs stay together
    const Vec c = load_up_to(turn + j, lanes), s = load_up_to(turn + rotary_dim + j, lanes);
    const Vec a = load_up_to(x + j, lanes);
    store_up_to(x + j, fma(a, c, swap_pairs(a) * s), lanes);
  });
}

void rope(const RopeRows& a) {
  for (int64_t row = 0; row < a.rows; ++row)
    for (int64_t head = 0; head < a.heads; ++head) {
      float* x = a.x + row * a.stride + head * a.head_dim;
      if (a.interleaved)
        rotate_pairs(x, a.turns[row], a.rotary_dim);
      else
        rotate_halves(x, a.turns[row], a.rotary_dim / 2);
    }
}

template <typename E>
inline void put(E* to, Vec x, int lanes) {
  if (lanes == kLanes) return store(to, x);
  E all[kLanes];
  store(all, x);
  for (int i = 0; i < lanes; ++i) to[i] = all[i];
}

inline I8 code_of(float x, I8) { return {static_cast<int8_t>(x)}; }
inline E4M3 code_of(float x, E4M3) { return {float_to_e4m3(x)}; }
inline E5M2 code_of(float x, E5M2) { return {float_to_e5m2(x)}; }

// Numbers as codes: put(column, code) for each. Returns their scale.
template <typename E, typename Put>
inline BF16 encode(const float* x, int64_t width, float given, Put put) {
  Vec most = broadcast(0), bad = broadcast(0);
  for_each_vec(width, [&](int64_t i, int lanes) {
    const Vec each = load_up_to(x + i, lanes);
    most = max_with(most, absolute(each));
    bad = fma(each, broadcast(0), bad);  // NaN where one is not finite
  });
  const float spoilt = sum_lanes(bad);
  const BF16 scale{code_scale(spoilt == 0 ? max_lanes(most) : spoilt, largest_code(E::kType), given)};
  const Vec inverse = broadcast(code_inverse(bf16_to_float(scale.bits)));
  constexpr int64_t kAtOnce = 64;
  for (int64_t first = 0; first < width; first += kAtOnce) {
    float scaled[kAtOnce] = {};
    E codes[kAtOnce];
    const int64_t count = width - first < kAtOnce ? width - first : kAtOnce;
    if (spoilt == 0)
      for_each_vec(count, [&](int64_t i, int lanes) {
        const Vec y = load_up_to(x + first + i, lanes) * inverse;
        store_up_to(scaled + i, E::kType == DType::i8 ? round_even(y) : y, lanes);
      });
    for (int64_t i = 0; i < kAtOnce; ++i) codes[i] = code_of(scaled[i], E{});
    for (int64_t i = 0; i < count; ++i) put(first + i, codes[i]);
  }
  return scale;
}

// A head's block of keys, and its token's values in it.
template <typename E>
struct KvTarget {
  E *keys, *values;
  int64_t lane;
};

// A token's keys lie 16 apart, on a cache line for every one or two of them, and in decode none of these lines is in the cache.
// So the lines of the next head, or the next token, are asked for while this one's are written.
template <typename E>
void write_kv_as(const WriteKvRows& a) {
  const KvLayer& layer = a.layer;
  constexpr int64_t kLine = 64 / sizeof(E);
  const int64_t v_dim = layer.values_in_keys ? 0 : layer.v_dim;  // of the values to write
  const auto target = [&](int64_t row, int64_t head) {
    const KvSlot& slot = a.slots[row];
    E* keys = reinterpret_cast<E*>(kv_block(layer, slot.page, head, slot.block));
    return KvTarget<E>{keys, keys + layer.head_dim * kBlockTokens + slot.lane * v_dim, slot.lane};
  };
  const auto fetch = [&](const KvTarget<E>& t) {
    for (int64_t i = 0; i < layer.head_dim * kBlockTokens; i += kLine) __builtin_prefetch(t.keys + i, 1);
    for (int64_t i = 0; i < v_dim; i += kLine) __builtin_prefetch(t.values + i, 1);
  };
  KvTarget<E> next = target(0, 0);
  fetch(next);
  for (int64_t row = 0; row < a.rows; ++row)
    for (int64_t head = 0; head < layer.kv_heads; ++head) {
      const KvTarget<E> here = next;
      if (head + 1 < layer.kv_heads || row + 1 < a.rows) {
        next = head + 1 < layer.kv_heads ? target(row, head + 1) : target(row + 1, 0);
        fetch(next);
      }
      const float* k = a.k + row * a.k_stride + head * layer.head_dim;
      const float* v = a.v + row * a.v_stride + head * v_dim;
      if constexpr (kCoded<E>) {
        BF16* scales = kv_scales(layer, here.keys) + here.lane;
        const bool e4m3 = E::kType == DType::f8_e4m3;
        scales[0] = encode<E>(k, layer.head_dim, e4m3 ? layer.k_scale : 0,
                              [&](int64_t i, E code) { here.keys[i * kBlockTokens + here.lane] = code; });
        scales[kBlockTokens] = encode<E>(v, v_dim, e4m3 ? layer.v_scale : 0, [&](int64_t i, E code) { here.values[i] = code; });
      } else {
        E lanes_of[kLanes];
        for_each_vec(layer.head_dim, [&](int64_t i, int lanes) {
          store(lanes_of, load_up_to(k + i, lanes));
          for (int j = 0; j < lanes; ++j) here.keys[(i + j) * kBlockTokens + here.lane] = lanes_of[j];
        });
        for_each_vec(v_dim, [&](int64_t i, int lanes) { put(here.values + i, load_up_to(v + i, lanes), lanes); });
      }
    }
}

void write_kv(const WriteKvRows& a) {
  switch (a.layer.dtype) {
    case DType::f16: return write_kv_as<F16>(a);
    case DType::bf16: return write_kv_as<BF16>(a);
    case DType::i8: return write_kv_as<I8>(a);
    case DType::f8_e4m3: return write_kv_as<E4M3>(a);
    case DType::f8_e5m2: return write_kv_as<E5M2>(a);
    default: return write_kv_as<float>(a);
  }
}

constexpr RowKernels kTable{norm, activation, bound, add, rope, scale, write_kv};
