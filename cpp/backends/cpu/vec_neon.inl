// Vectors of 4 floats: 64-bit Arm NEON. vec.h says what is here.

constexpr int kLanes = 4;

using Vec = float32x4_t;
using Ints = int32x4_t;

inline uint32x4_t first_lanes(int n) {
  const int32x4_t lane = {0, 1, 2, 3};
  return vcltq_s32(lane, vdupq_n_s32(n));
}

inline Vec broadcast(float x) { return vdupq_n_f32(x); }
inline Vec load(const float* p) { return vld1q_f32(p); }
inline Vec load(const F16* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))); }
inline Vec load(const BF16* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&p->bits), 16)); }
inline int16x4_t load_four_bytes(const void* p) {  // with their signs
  uint32_t four;
  __builtin_memcpy(&four, p, 4);
  return vget_low_s16(vmovl_s8(vcreate_s8(four)));
}
inline Vec load(const I8* p) { return vcvtq_f32_s32(vmovl_s16(load_four_bytes(p))); }
inline Vec load(const E4M3* p) {
  const int16x4_t half = vand_s16(vshl_n_s16(load_four_bytes(p), 7), vdup_n_s16(static_cast<int16_t>(0xbf80)));
  return vcvt_f32_f16(vreinterpret_f16_s16(half));
}
inline Vec load(const E5M2* p) { return vcvt_f32_f16(vreinterpret_f16_s16(vshl_n_s16(load_four_bytes(p), 8))); }
inline Vec load_first(const float* p, int n) {
  float lanes[kLanes] = {};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}
inline void store(float* p, Vec x) { vst1q_f32(p, x); }
inline void store_first(float* p, Vec x, int n) {
  float lanes[kLanes];
  store(lanes, x);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}
inline void store(F16* p, Vec x) { vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
inline void store(BF16* p, Vec x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
  const uint32x4_t kept = vbslq_u32(vceqq_f32(x, x), rounded, vdupq_n_u32(0x7fc00000));
  vst1_u16(&p->bits, vshrn_n_u32(kept, 16));
}

inline Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
// Where `x` is NaN the result is NaN.
inline Vec max_with(Vec bound, Vec x) { return vmaxq_f32(bound, x); }
inline Vec min_with(Vec bound, Vec x) { return vminq_f32(bound, x); }
inline Vec zero_where_less(Vec x, Vec limit, Vec y) { return vbslq_f32(vcltq_f32(x, limit), vdupq_n_f32(0), y); }
inline Vec select_negative(Vec x, Vec negative, Vec other) { return vbslq_f32(vcltq_f32(x, vdupq_n_f32(0)), negative, other); }
inline Vec absolute(Vec x) { return vabsq_f32(x); }
inline Vec round_even(Vec x) { return vrndnq_f32(x); }
inline Vec scale_by_power(Vec x, Vec n) {  // x * 2^n, n whole, -126 to 127
  const Ints exponent = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
  return vmulq_f32(x, vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)));
}
inline Vec swap_pairs(Vec x) { return vrev64q_f32(x); }

// Lane i stays where first <= i < last, and becomes `fill` elsewhere.
inline Vec keep_lanes(Vec x, int64_t first, int64_t last, Vec fill) {
  const int from = static_cast<int>(first < 0 ? 0 : first > kLanes ? kLanes : first);
  const int to = static_cast<int>(last < 0 ? 0 : last > kLanes ? kLanes : last);
  return vbslq_f32(vbicq_u32(first_lanes(to), first_lanes(from)), x, fill);
}

inline float sum_lanes(Vec x) { return vaddvq_f32(x); }
inline float max_lanes(Vec x) { return vmaxvq_f32(x); }  // NaN if any lane is

inline Vec to_float(Ints x) { return vcvtq_f32_s32(x); }
inline Ints load_words(const void* p) { return vld1q_s32(static_cast<const int32_t*>(p)); }
inline Ints bits_of(Ints words, int shift, int mask) {
  return vreinterpretq_s32_u32(
      vandq_u32(vshlq_u32(vreinterpretq_u32_s32(words), vdupq_n_s32(-shift)), vdupq_n_u32(static_cast<uint32_t>(mask))));
}
inline int8x16_t low_nibbles(const uint8_t* p) { return vreinterpretq_s8_u8(vandq_u8(vld1q_u8(p), vdupq_n_u8(15))); }
inline int8x16_t high_nibbles(const uint8_t* p) { return vreinterpretq_s8_u8(vshrq_n_u8(vld1q_u8(p), 4)); }
inline int8x16_t broadcast4(const int8_t* x) {  // four bytes in every lane
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(four));
}
