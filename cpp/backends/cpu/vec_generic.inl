// Vectors of 4 floats in the compiler's portable vectors: any processor. vec.h says what is here.

constexpr int kLanes = 4;

using Vec = float __attribute__((vector_size(16)));
using Ints = int32_t __attribute__((vector_size(16)));

inline Vec broadcast(float x) { return Vec{x, x, x, x}; }
inline Vec load(const float* p) {
  Vec x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
inline Vec load(const F16* p) {
  return Vec{f16_to_float(p[0].bits), f16_to_float(p[1].bits), f16_to_float(p[2].bits), f16_to_float(p[3].bits)};
}
inline Vec load(const BF16* p) {
  return Vec{bf16_to_float(p[0].bits), bf16_to_float(p[1].bits), bf16_to_float(p[2].bits), bf16_to_float(p[3].bits)};
}
inline Vec load(const I8* p) {
  return Vec{static_cast<float>(p[0].bits), static_cast<float>(p[1].bits), static_cast<float>(p[2].bits),
             static_cast<float>(p[3].bits)};
}
inline Vec load(const E4M3* p) {
  Vec x;
  for (int i = 0; i < kLanes; ++i) x[i] = e4m3_to_float(p[i].bits) / E4M3::kUnit;
  return x;
}
inline Vec load(const E5M2* p) {
  Vec x;
  for (int i = 0; i < kLanes; ++i) x[i] = e5m2_to_float(p[i].bits);
  return x;
}
inline Vec load_first(const float* p, int n) {
  Vec x = broadcast(0);
  for (int i = 0; i < n; ++i) x[i] = p[i];
  return x;
}
inline void store(float* p, Vec x) { __builtin_memcpy(p, &x, sizeof x); }
inline void store_first(float* p, Vec x, int n) {
  for (int i = 0; i < n; ++i) p[i] = x[i];
}
inline void store(F16* p, Vec x) {
  for (int i = 0; i < kLanes; ++i) p[i].bits = float_to_f16(x[i]);
}
inline void store(BF16* p, Vec x) {
  for (int i = 0; i < kLanes; ++i) p[i].bits = float_to_bf16(x[i]);
}

inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
// Where `x` is NaN the result is NaN.
inline Vec max_with(Vec bound, Vec x) { return bound > x ? bound : x; }
inline Vec min_with(Vec bound, Vec x) { return bound < x ? bound : x; }
inline Vec zero_where_less(Vec x, Vec limit, Vec y) { return x < limit ? Vec{} : y; }
inline Vec select_negative(Vec x, Vec negative, Vec other) { return x < Vec{} ? negative : other; }
inline Vec absolute(Vec x) { return x < Vec{} ? -x : x; }

// |x| < 2^22: adding this, 1.5 * 2^23, leaves no bits for a fraction, and the whole number in the low ones.
constexpr float kRounder = 12582912.0f;
inline Vec round_even(Vec x) { return (x + broadcast(kRounder)) - broadcast(kRounder); }
inline Vec scale_by_power(Vec x, Vec n) {  // x * 2^n, n whole, -126 to 127
  const Ints whole = reinterpret_cast<Ints>(n + broadcast(kRounder)) - reinterpret_cast<Ints>(broadcast(kRounder));
  return x * reinterpret_cast<Vec>((whole + 127) << 23);
}
inline Vec swap_pairs(Vec x) { return Vec{x[1], x[0], x[3], x[2]}; }

// Lane i stays where first <= i < last, and becomes `fill` elsewhere.
inline Vec keep_lanes(Vec x, int64_t first, int64_t last, Vec fill) {
  for (int64_t i = 0; i < kLanes; ++i)
    if (i < first || i >= last) x[i] = fill[i];
  return x;
}

inline float sum_lanes(Vec x) { return (x[0] + x[2]) + (x[1] + x[3]); }
// NaN if any lane is.
inline float max_lanes(Vec x) {
  float m = x[0];
  for (int i = 1; i < kLanes; ++i) m = m > x[i] ? m : x[i];
  for (int i = 0; i < kLanes; ++i)
    if (x[i] != x[i]) return x[i];
  return m;
}

inline Vec to_float(Ints x) { return __builtin_convertvector(x, Vec); }
inline Ints load_words(const void* p) {
  Ints words;
  __builtin_memcpy(&words, p, sizeof words);
  return words;
}
inline Ints bits_of(Ints words, int shift, int mask) { return (words >> shift) & mask; }
