// Vectors of 16 rows, for both kinds of AVX-512. Included in the anonymous namespace of one instruction set.

constexpr int kLanes = 16;
constexpr int kQuantizedTile = 16, kExactTile = 12, kExactPanels = 2;
constexpr int kByteBias = 0;

using F = __m512;
using I = __m512i;

inline F set1(float x) { return _mm512_set1_ps(x); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline F load_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline F load_bfloat(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F subtract(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F divide(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F negate(F x) { return _mm512_xor_ps(x, set1(-0.0f)); }
inline F absolute(F x) { return _mm512_andnot_ps(set1(-0.0f), x); }
// min and max return their second operand if either is NaN.
inline F clamp(F x, float low, float high) { return _mm512_min_ps(set1(high), _mm512_max_ps(set1(low), x)); }
inline F where_negative(F x, F yes, F no) { return _mm512_mask_blend_ps(_mm512_movepi32_mask(_mm512_castps_si512(x)), no, yes); }
inline F to_float(I x) { return _mm512_cvtepi32_ps(x); }
inline I round_to_int(F x) { return _mm512_cvtps_epi32(x); }
inline F power_of_two(I n) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23)); }

inline I load_words(const void* p) { return _mm512_loadu_si512(p); }
inline I bits_of(I words, int shift, int mask) {
  return _mm512_and_si512(_mm512_srli_epi32(words, static_cast<unsigned>(shift)), _mm512_set1_epi32(mask));
}

// Four activations in every lane.
inline I broadcast4(const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  return _mm512_set1_epi32(four);
}
inline I low_nibbles(I words) { return _mm512_and_si512(words, _mm512_set1_epi8(15)); }
inline I high_nibbles(I words) { return low_nibbles(_mm512_srli_epi16(words, 4)); }
