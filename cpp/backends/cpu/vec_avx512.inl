// Vec of 16 floats: AVX-512 F/BW/DQ/VL. Included inside an unnamed namespace, so nothing of it leaves its translation unit.

constexpr int kLanes = 16;
// Of the attention kernel: rows of a tile, and registers that it may hold as sums.
constexpr int kTileRows = 6, kAccumulators = 24;

struct Vec {
  __m512 v;
};

inline Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vec load(const F16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline Vec load(const BF16* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline Vec load_first(const float* p, int n) { return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p)}; }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x.v); }
inline void store_first(float* p, Vec x, int n) { _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), x.v); }
inline void store(F16* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store(BF16* p, Vec x) {
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  const __m512i kept = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(kept));
}

inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Where `x` is NaN the result is NaN.
inline Vec max_with(Vec bound, Vec x) { return {_mm512_max_ps(bound.v, x.v)}; }
inline Vec min_with(Vec bound, Vec x) { return {_mm512_min_ps(bound.v, x.v)}; }
inline Vec zero_where_less(Vec x, Vec limit, Vec y) {
  return {_mm512_mask_mov_ps(y.v, _mm512_cmp_ps_mask(x.v, limit.v, _CMP_LT_OQ), _mm512_setzero_ps())};
}
inline Vec select_negative(Vec x, Vec negative, Vec other) {
  return {_mm512_mask_mov_ps(other.v, _mm512_cmp_ps_mask(x.v, _mm512_setzero_ps(), _CMP_LT_OQ), negative.v)};
}
inline Vec absolute(Vec x) { return {_mm512_abs_ps(x.v)}; }
inline Vec round_even(Vec x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec scale_by_power(Vec x, Vec n) { return {_mm512_scalef_ps(x.v, n.v)}; }  // x * 2^n, n whole, -126 to 127
inline Vec swap_pairs(Vec x) { return {_mm512_permute_ps(x.v, 0xB1)}; }

// Lane i stays where first <= i < last, and becomes `fill` elsewhere.
inline Vec keep_lanes(Vec x, int64_t first, int64_t last, Vec fill) {
  const int64_t from = first < 0 ? 0 : first > kLanes ? kLanes : first;
  const int64_t to = last < from ? from : last > kLanes ? kLanes : last;
  const uint32_t mask = ((1u << to) - 1) & ~((1u << from) - 1);
  return {_mm512_mask_mov_ps(fill.v, static_cast<__mmask16>(mask), x.v)};
}

inline float sum_lanes(Vec x) { return _mm512_reduce_add_ps(x.v); }
// NaN if any lane is.
inline float max_lanes(Vec x) {
  return _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q) ? __builtin_nanf("") : _mm512_reduce_max_ps(x.v);
}
