// Functions over Vec, the same for every instruction set. Included after a vec_*.inl, inside the same unnamed namespace.

// 2^(n + f), relative error below 2e-7, n whole, f in [-1/2, 1/2]; exactly 1 at 0. A minimax polynomial in f.
inline Vec power_of_two(Vec n, Vec f) {
  Vec p = broadcast(0.00015353361959569156f);
  p = fma(p, f, broadcast(0.0013398875016719103f));
  p = fma(p, f, broadcast(0.00961843691766262f));
  p = fma(p, f, broadcast(0.055503323674201965f));
  p = fma(p, f, broadcast(0.24022647738456726f));
  p = fma(p, f, broadcast(0.6931471824645996f));
  p = fma(p, f, broadcast(1.0f));
  return scale_by_power(p, n);
}

// Both: 0 where the result would be below 2^-126, bounded above near 2^127; NaN stays NaN.
inline Vec exp2(Vec x) {
  const Vec low = broadcast(-126.0f);
  const Vec bounded = min_with(broadcast(127.0f), max_with(low, x));
  const Vec n = round_even(bounded);
  return zero_where_less(x, low, power_of_two(n, bounded - n));
}

constexpr float kLog2E = 1.4426950408889634f;

inline Vec exp(Vec x) {
  const Vec low = broadcast(-87.3f);
  const Vec bounded = min_with(broadcast(88.0f), max_with(low, x));
  const Vec n = round_even(bounded * broadcast(kLog2E));
  // Cody and Waite: ln 2 in two parts, the first with few enough bits that n times it is exact.
  Vec r = fma(n, broadcast(-0.693359375f), bounded);
  r = fma(n, broadcast(2.12194440e-4f), r);
  return zero_where_less(x, low, power_of_two(n, r * broadcast(kLog2E)));
}

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

inline Vec times_sigmoid(Vec x, Vec y) { return x / (broadcast(1.0f) + exp(-y)); }

inline Vec gelu(Vec x) {
  const Vec tail = normal_tail(x);
  return x * select_negative(x, tail, broadcast(1.0f) - tail);
}
// 0.5 x (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
inline Vec gelu_tanh(Vec x) {
  constexpr float kTwice = 2 * 0.7978845608028654f;
  return times_sigmoid(x, x * fma(x * x, broadcast(kTwice * 0.044715f), broadcast(kTwice)));
}

// 1 - 2 / (exp(2 |x|) + 1), or near 0, where that loses digits, the first terms of the series.
inline Vec tanh(Vec x) {
  const Vec z = absolute(x), square = x * x;
  const Vec far = broadcast(1.0f) - broadcast(2.0f) / (exp(z + z) + broadcast(1.0f));
  Vec series = fma(square, broadcast(-17.0f / 315), broadcast(2.0f / 15));
  series = x * fma(square, fma(square, series, broadcast(-1.0f / 3)), broadcast(1.0f));
  return select_negative(z - broadcast(0.125f), series, select_negative(x, -far, far));
}

inline Vec activate(ActivationKind kind, Vec x) {
  switch (kind) {
    case ActivationKind::silu: return times_sigmoid(x, x);
    case ActivationKind::gelu: return gelu(x);
    case ActivationKind::gelu_tanh: return gelu_tanh(x);
    case ActivationKind::relu: return max_with(broadcast(0.0f), x);
    case ActivationKind::relu2: return max_with(broadcast(0.0f), x) * max_with(broadcast(0.0f), x);
  }
  return x;
}
