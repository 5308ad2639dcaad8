// Vec of 4 floats in the compiler's portable vectors: any processor. Included inside an unnamed namespace, as its siblings.

constexpr int kLanes = 4;
// Of the attention kernel: rows of a tile, and registers that it may hold as sums.
constexpr int kTileRows = 6, kAccumulators = 12;

typedef float Lanes __attribute__((vector_size(16)));

struct Vec {
  Lanes v;
};

inline Vec broadcast(float x) { return {Lanes{x, x, x, x}}; }
inline Vec load(const float* p) {
  Vec x;
  __builtin_memcpy(&x.v, p, sizeof(x.v));
  return x;
}
inline Vec load(const F16* p) {
  return {Lanes{f16_to_float(p[0].bits), f16_to_float(p[1].bits), f16_to_float(p[2].bits), f16_to_float(p[3].bits)}};
}
inline Vec load(const BF16* p) {
  return {Lanes{bf16_to_float(p[0].bits), bf16_to_float(p[1].bits), bf16_to_float(p[2].bits), bf16_to_float(p[3].bits)}};
}
inline Vec load_first(const float* p, int n) {
  Vec x = broadcast(0);
  for (int i = 0; i < n; ++i) x.v[i] = p[i];
  return x;
}
inline void store(float* p, Vec x) { __builtin_memcpy(p, &x.v, sizeof(x.v)); }
inline void store_first(float* p, Vec x, int n) {
  for (int i = 0; i < n; ++i) p[i] = x.v[i];
}
inline void store(F16* p, Vec x) {
  for (int i = 0; i < kLanes; ++i) p[i].bits = float_to_f16(x.v[i]);
}
inline void store(BF16* p, Vec x) {
  for (int i = 0; i < kLanes; ++i) p[i].bits = float_to_bf16(x.v[i]);
}

inline Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
inline Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
inline Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
inline Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
// Where `x` is NaN the result is NaN.
inline Vec max_with(Vec bound, Vec x) { return {bound.v > x.v ? bound.v : x.v}; }
inline Vec min_with(Vec bound, Vec x) { return {bound.v < x.v ? bound.v : x.v}; }
inline Vec zero_where_less(Vec x, Vec limit, Vec y) { return {x.v < limit.v ? Lanes{} : y.v}; }
inline Vec select_negative(Vec x, Vec negative, Vec other) { return {x.v < Lanes{} ? negative.v : other.v}; }
inline Vec absolute(Vec x) { return {x.v < Lanes{} ? -x.v : x.v}; }
inline Vec round_even(Vec x) {  // |x| < 2^22: adding 1.5 * 2^23 leaves no bits for a fraction
  const Lanes magic = broadcast(12582912.0f).v;
  return {(x.v + magic) - magic};
}
inline Vec scale_by_power(Vec x, Vec n) {  // x * 2^n, n whole, -126 to 127
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n.v[i] == n.v[i] ? n.v[i] : 0.0f) + 127) << 23;
    float power;
    __builtin_memcpy(&power, &bits, sizeof(power));
    x.v[i] *= power;
  }
  return x;
}
inline Vec swap_pairs(Vec x) { return {Lanes{x.v[1], x.v[0], x.v[3], x.v[2]}}; }

// Lane i stays where first <= i < last, and becomes `fill` elsewhere.
inline Vec keep_lanes(Vec x, int64_t first, int64_t last, Vec fill) {
  for (int64_t i = 0; i < kLanes; ++i)
    if (i < first || i >= last) x.v[i] = fill.v[i];
  return x;
}

inline float sum_lanes(Vec x) { return (x.v[0] + x.v[2]) + (x.v[1] + x.v[3]); }
// NaN if any lane is.
inline float max_lanes(Vec x) {
  float m = x.v[0];
  for (int i = 1; i < kLanes; ++i) m = m > x.v[i] ? m : x.v[i];
  for (int i = 0; i < kLanes; ++i)
    if (x.v[i] != x.v[i]) return x.v[i];
  return m;
}
