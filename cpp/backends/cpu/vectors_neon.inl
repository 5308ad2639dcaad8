// Vectors of 4 rows, for both kinds of NEON. Included in the anonymous namespace of one instruction set.

constexpr int kLanes = 4;
constexpr int kQuantizedTile = 8, kExactTile = 6, kExactPanels = 1;

using F = float32x4_t;
using I = int32x4_t;

inline F set1(float x) { return vdupq_n_f32(x); }
inline F load(const float* p) { return vld1q_f32(p); }
inline F load_half(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
inline F load_bfloat(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
inline void store(float* p, F x) { vst1q_f32(p, x); }
inline F add(F a, F b) { return vaddq_f32(a, b); }
inline F subtract(F a, F b) { return vsubq_f32(a, b); }
inline F mul(F a, F b) { return vmulq_f32(a, b); }
inline F divide(F a, F b) { return vdivq_f32(a, b); }
inline F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
inline F negate(F x) { return vnegq_f32(x); }
inline F absolute(F x) { return vabsq_f32(x); }
inline F clamp(F x, float low, float high) { return vminq_f32(set1(high), vmaxq_f32(set1(low), x)); }
inline F where_negative(F x, F yes, F no) { return vbslq_f32(vcltq_f32(x, set1(0)), yes, no); }
inline F to_float(I x) { return vcvtq_f32_s32(x); }
inline I round_to_int(F x) { return vcvtnq_s32_f32(x); }
inline F power_of_two(I n) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23)); }

inline I load_words(const void* p) { return vld1q_s32(static_cast<const int32_t*>(p)); }
inline I bits_of(I words, int shift, int mask) {
  return vreinterpretq_s32_u32(vandq_u32(vshlq_u32(vreinterpretq_u32_s32(words), vdupq_n_s32(-shift)), vdupq_n_u32(static_cast<uint32_t>(mask))));
}

// Four activations in every lane.
inline int8x16_t broadcast4(const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(four));
}
inline int8x16_t low_nibbles(const uint8_t* p) { return vreinterpretq_s8_u8(vandq_u8(vld1q_u8(p), vdupq_n_u8(15))); }
inline int8x16_t high_nibbles(const uint8_t* p) { return vreinterpretq_s8_u8(vshrq_n_u8(vld1q_u8(p), 4)); }
