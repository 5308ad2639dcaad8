// Vectors of 16 floats: AVX-512 F/BW/DQ/VL. vec.h says what is here.

constexpr int kLanes = 16;

using Vec = __m512;
using Ints = __m512i;

inline __mmask16 first_lanes(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }

inline Vec broadcast(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load(const F16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Vec load(const BF16* p) {
  const Ints wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline Vec load(const I8* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline Vec load(const E4M3* p) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbf80))));
}
inline Vec load(const E5M2* p) {
  const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm512_cvtph_ps(_mm256_slli_epi16(wide, 8));
}
inline Vec load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline void store_first(float* p, Vec x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }
inline void store(F16* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store(BF16* p, Vec x) {
  const Ints bits = _mm512_castps_si512(x);
  const Ints odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const Ints rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const Ints kept = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(kept));
}

inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
// Where `x` is NaN the result is NaN.
inline Vec max_with(Vec bound, Vec x) { return _mm512_max_ps(bound, x); }
inline Vec min_with(Vec bound, Vec x) { return _mm512_min_ps(bound, x); }
inline Vec zero_where_less(Vec x, Vec limit, Vec y) {
  return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), _mm512_setzero_ps());
}
inline Vec select_negative(Vec x, Vec negative, Vec other) {
  return _mm512_mask_mov_ps(other, _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ), negative);
}
inline Vec absolute(Vec x) { return _mm512_abs_ps(x); }
inline Vec round_even(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec scale_by_power(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }  // x * 2^n, n whole, -126 to 127
inline Vec swap_pairs(Vec x) { return _mm512_permute_ps(x, 0xB1); }

// Lane i stays where first <= i < last, and becomes `fill` elsewhere.
inline Vec keep_lanes(Vec x, int64_t first, int64_t last, Vec fill) {
  const int64_t from = first < 0 ? 0 : first > kLanes ? kLanes : first;
  const int64_t to = last < from ? from : last > kLanes ? kLanes : last;
  return _mm512_mask_mov_ps(fill, static_cast<__mmask16>(first_lanes(to) & ~first_lanes(from)), x);
}

inline float sum_lanes(Vec x) { return _mm512_reduce_add_ps(x); }
// NaN if any lane is.
inline float max_lanes(Vec x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) ? __builtin_nanf("") : _mm512_reduce_max_ps(x); }

inline Vec to_float(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Ints load_words(const void* p) { return _mm512_loadu_si512(p); }
inline Ints bits_of(Ints words, int shift, int mask) {
  return _mm512_and_si512(_mm512_srli_epi32(words, static_cast<unsigned>(shift)), _mm512_set1_epi32(mask));
}
inline Ints low_nibbles(const uint8_t* p) { return _mm512_and_si512(load_words(p), _mm512_set1_epi8(15)); }
inline Ints high_nibbles(const uint8_t* p) { return _mm512_and_si512(_mm512_srli_epi16(load_words(p), 4), _mm512_set1_epi8(15)); }
inline Ints broadcast4(const int8_t* x) {  // four bytes in every lane
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  return _mm512_set1_epi32(four);
}
