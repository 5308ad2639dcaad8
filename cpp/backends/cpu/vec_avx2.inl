// Vectors of 8 floats: AVX2, FMA and F16C. vec.h says what is here.

constexpr int kLanes = 8;

using Vec = __m256;
using Ints = __m256i;

inline Ints first_lanes(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)); }

inline Vec broadcast(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec load(const F16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Vec load(const BF16* p) {
  const Ints wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline __m128i load_eight_bytes(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
inline Vec load(const I8* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_eight_bytes(p))); }
inline Vec load(const E4M3* p) {
  const __m128i shifted = _mm_slli_epi16(_mm_cvtepi8_epi16(load_eight_bytes(p)), 7);
  return _mm256_cvtph_ps(_mm_and_si128(shifted, _mm_set1_epi16(static_cast<int16_t>(0xbf80))));
}
inline Vec load(const E5M2* p) { return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(load_eight_bytes(p)), 8)); }
inline Vec load_first(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
inline void store_first(float* p, Vec x, int n) { _mm256_maskstore_ps(p, first_lanes(n), x); }
inline void store(F16* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store(BF16* p, Vec x) {
  const Ints bits = _mm256_castps_si256(x);
  const Ints odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const Ints rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
  const Ints nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const Ints kept = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
  const Ints packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(kept, kept), 0xD8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
// Where `x` is NaN the result is NaN.
inline Vec max_with(Vec bound, Vec x) { return _mm256_max_ps(bound, x); }
inline Vec min_with(Vec bound, Vec x) { return _mm256_min_ps(bound, x); }
inline Vec zero_where_less(Vec x, Vec limit, Vec y) { return _mm256_andnot_ps(_mm256_cmp_ps(x, limit, _CMP_LT_OQ), y); }
inline Vec select_negative(Vec x, Vec negative, Vec other) {
  return _mm256_blendv_ps(other, negative, _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_LT_OQ));
}
inline Vec absolute(Vec x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
inline Vec round_even(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec scale_by_power(Vec x, Vec n) {  // x * 2^n, n whole, -126 to 127
  const Ints exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
inline Vec swap_pairs(Vec x) { return _mm256_permute_ps(x, 0xB1); }

// Lane i stays where first <= i < last, and becomes `fill` elsewhere.
inline Vec keep_lanes(Vec x, int64_t first, int64_t last, Vec fill) {
  const int from = static_cast<int>(first < 0 ? 0 : first > kLanes ? kLanes : first);
  const int to = static_cast<int>(last < 0 ? 0 : last > kLanes ? kLanes : last);
  return _mm256_blendv_ps(fill, x, _mm256_castsi256_ps(_mm256_andnot_si256(first_lanes(from), first_lanes(to))));
}

inline float sum_lanes(Vec x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
// NaN if any lane is.
inline float max_lanes(Vec x) {
  if (_mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q))) return __builtin_nanf("");
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

inline Vec to_float(Ints x) { return _mm256_cvtepi32_ps(x); }
inline Ints load_words(const void* p) { return _mm256_loadu_si256(static_cast<const Ints*>(p)); }
inline Ints bits_of(Ints words, int shift, int mask) {
  return _mm256_and_si256(_mm256_srli_epi32(words, shift), _mm256_set1_epi32(mask));
}
inline Ints low_nibbles(const uint8_t* p) { return _mm256_and_si256(load_words(p), _mm256_set1_epi8(15)); }
inline Ints high_nibbles(const uint8_t* p) { return _mm256_and_si256(_mm256_srli_epi16(load_words(p), 4), _mm256_set1_epi8(15)); }
inline Ints broadcast4(const int8_t* x) {  // four bytes in every lane
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  return _mm256_set1_epi32(four);
}
