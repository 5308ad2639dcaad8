// Functions over Vec, the same for every instruction set. Included after a vec_*.inl, inside the same unnamed namespace.

// 2^x, relative error below 2e-7; 0 below -126; exactly 1 at 0; NaN stays NaN. A minimax polynomial on [-1/2, 1/2].
inline Vec exp2(Vec x) {
  const Vec low = broadcast(-126.0f);
  const Vec bounded = min_with(broadcast(127.0f), max_with(low, x));
  const Vec n = round_even(bounded);
  const Vec f = bounded - n;
  Vec p = broadcast(0.00015353361959569156f);
  p = fma(p, f, broadcast(0.0013398875016719103f));
  p = fma(p, f, broadcast(0.00961843691766262f));
  p = fma(p, f, broadcast(0.055503323674201965f));
  p = fma(p, f, broadcast(0.24022647738456726f));
  p = fma(p, f, broadcast(0.6931471824645996f));
  p = fma(p, f, broadcast(1.0f));
  return zero_where_less(x, low, scale_by_power(p, n));
}

constexpr float kLog2E = 1.4426950408889634f;

inline Vec exp(Vec x) { return exp2(x * broadcast(kLog2E)); }
inline Vec sigmoid(Vec x) { return broadcast(1.0f) / (broadcast(1.0f) + exp(broadcast(0.0f) - x)); }

// The normal distribution's integral up to -|x|, from a fit of exp(x^2 / 2) * phi(-x) in 1 / (1 + 0.35 x); relative error 3e-7
// times max(1, x^2), so that the tail keeps its digits.
inline Vec normal_tail(Vec x) {
  const Vec z = absolute(x);
  const Vec t = broadcast(1.0f) / fma(broadcast(0.35f), z, broadcast(1.0f));
  Vec p = broadcast(-0.02914556674659252f);
  p = fma(p, t, broadcast(0.1439700573682785f));
  p = fma(p, t, broadcast(-0.2557111084461212f));
  p = fma(p, t, broadcast(0.15917085111141205f));
  p = fma(p, t, broadcast(-0.02310774475336075f));
  p = fma(p, t, broadcast(0.10550719499588013f));
  p = fma(p, t, broadcast(0.11983305215835571f));
  p = fma(p, t, broadcast(0.1398618519306183f));
  p = fma(p, t, broadcast(0.13962140679359436f));
  return p * t * exp(z * z * broadcast(-0.5f));
}

inline Vec silu(Vec x) { return x * sigmoid(x); }
inline Vec gelu(Vec x) {
  const Vec tail = normal_tail(x);
  return x * select_negative(x, tail, broadcast(1.0f) - tail);
}
// 0.5 x (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
inline Vec gelu_tanh(Vec x) {
  const Vec inner = fma(x * x, broadcast(2 * 0.7978845608028654f * 0.044715f), broadcast(2 * 0.7978845608028654f));
  return x * sigmoid(x * inner);
}
inline Vec relu(Vec x) { return max_with(broadcast(0.0f), x); }
