// Cosines and sines of a step's positions, and rotation where it is not part of prepare_qkv.
#include <algorithm>

#include "backends/cuda/rows.cuh"

namespace maga::cuda {
namespace {

// theta' = theta * growth ^ (r / (r - 2)), growth = factor * length / M - (factor - 1), or Qwen's 2^ceil(log2(length / M) + 1) - 1
__device__ float stretched_frequency(const RopeTableArgs& args, int64_t length, int j) {
  const double r = args.rotary_dim, factor = args.dynamic_factor;
  const double ratio = static_cast<double>(length) / static_cast<double>(args.max_positions);
  const double growth = args.stepped ? exp2(ceil(log2(ratio) + 1)) - 1 : factor * ratio - (factor - 1);
  const double theta = args.theta * pow(growth, r / (r - 2));
  return static_cast<float>(1 / pow(theta, 2 * static_cast<double>(j) / r));
}

// A thread a pair. The angle is an fp32 product, as models are trained with it and as every backend here computes it.
template <bool kByLength>
__global__ void fill_turns(const RopeTableArgs args, const int32_t* positions, const int32_t* token_sequence,
                           const int32_t* prompt_length, int64_t pairs) {
  allow_next();
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int half = args.rotary_dim / 2;
  const int64_t token = i / half;
  const int j = static_cast<int>(i - token * half);
  float frequency = i < pairs ? args.inv_freq[j] : 0;
  wait_for_previous();
  if (i >= pairs) return;
  const int32_t position = positions[token];
  if constexpr (kByLength) {
    const int64_t prompt = prompt_length[token_sequence[token]];
    const int64_t length = args.stepped ? prompt : max(prompt, int64_t{position} + 1);
    if (length > args.max_positions) frequency = args.long_inv_freq ? args.long_inv_freq[j] : stretched_frequency(args, length, j);
  }
  float sine, cosine;
  sincosf(__fmul_rn(frequency, static_cast<float>(position)), &sine, &cosine);
  args.turns[i] = make_float2(cosine * args.multiplier, sine * args.multiplier);
}

template <typename T>
struct RopeCall {
  Rows<T> x;
  int rows, heads, head_dim, half;
  bool interleaved;
  const float2* turns;
};

// N pairs a thread: two vectors half a rotation apart, or, interleaved, side by side.
template <typename T, int N>
__global__ void rotate(const RopeCall<T> call) {
  allow_next();
  const int vectors = call.half / N;
  const int i = blockIdx.y * blockDim.x + threadIdx.x, row = blockIdx.x;
  wait_for_previous();
  if (i >= call.heads * vectors) return;
  const int head = i / vectors, pair = (i - head * vectors) * N;
  Vector<float, 2 * N> turns;
  turns.load(reinterpret_cast<const float*>(call.turns + int64_t{row} * call.half + pair));
  float turn[2 * N];
  turns.get(turn);
  T* x = call.x.at(row, head * call.head_dim);
  if (call.interleaved) {
    Vector<T, N> parts[2];
    float a[2][N];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      parts[i].load(x + 2 * pair + i * N);
      parts[i].get(a[i]);
    }
#pragma unroll
    for (int e = 0; e < N; ++e) {
      float& one = a[2 * e / N][2 * e % N];
      float& two = a[(2 * e + 1) / N][(2 * e + 1) % N];
      const float first = one;
      one = first * turn[2 * e] - two * turn[2 * e + 1];
      two = two * turn[2 * e] + first * turn[2 * e + 1];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      parts[i].set(a[i]);
      parts[i].store(x + 2 * pair + i * N);
    }
  } else {
    Vector<T, N> firsts, seconds;
    float a[N], b[N];
    firsts.load(x + pair);
    seconds.load(x + call.half + pair);
    firsts.get(a);
    seconds.get(b);
#pragma unroll
    for (int e = 0; e < N; ++e) {
      const float first = a[e];
      a[e] = first * turn[2 * e] - b[e] * turn[2 * e + 1];
      b[e] = b[e] * turn[2 * e] + first * turn[2 * e + 1];
    }
    firsts.set(a);
    seconds.set(b);
    firsts.store(x + pair);
    seconds.store(x + call.half + pair);
  }
}

template <typename T, int N>
void launch_rope(const Queue& queue, const RopeCall<T>& call) {
  const int threads = call.heads * (call.half / N), block = std::min(128, threads);
  launch(queue, rotate<T, N>, dim3(call.rows, (threads + block - 1) / block), dim3(block), 0, call);
}

}  // namespace

void rope_turns(const Queue& queue, const DeviceStep& step, const RopeTableArgs& args) {
  const int64_t pairs = int64_t{step.tokens} * (args.rotary_dim / 2);
  if (pairs == 0) return;
  constexpr int kThreads = 128;
  const bool by_length = args.dynamic_factor > 0 || args.stepped || args.long_inv_freq;
  auto* kernel = by_length ? fill_turns<true> : fill_turns<false>;
  launch(queue, kernel, dim3((pairs + kThreads - 1) / kThreads), dim3(kThreads), 0, args, args.positions, step.token_sequence,
         step.prompt_length, pairs);
}

void rope(const Queue& queue, DType type, const RopeArgs& args) {
  if (args.rows == 0 || args.heads == 0 || args.rotary_dim == 0) return;
  with_type(type, [&](auto element) {
    using T = decltype(element);
    const RopeCall<T> call{Rows<T>(args.x),     args.rows,        args.heads, args.head_dim,
                           args.rotary_dim / 2, args.interleaved, args.turns};
    constexpr int kWide = kVector<T> / 2;
    const bool vectors = call.half % kWide == 0 && args.head_dim % (2 * kWide) == 0 &&
                         takes_vectors<T>(args.x, args.heads * args.head_dim, 2 * kWide) && takes_vectors<float>(args.turns, 4);
    if (vectors) {
      launch_rope<T, kWide>(queue, call);
    } else {
      launch_rope<T, 1>(queue, call);
    }
  });
}

}  // namespace maga::cuda
