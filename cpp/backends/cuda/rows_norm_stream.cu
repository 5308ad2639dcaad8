// norm_stream: whole rows, which a few CTAs on each SM walk through with the next row always under way.
#include <algorithm>

#include "backends/cuda/rows_norm.cuh"

namespace maga::cuda {
namespace {

constexpr int kMostThreads = 384;
constexpr int kThreadsOfSm = 768;  // that its registers suffice for

// Else the compiler widens the weights once, ahead of the loop over rows, and has too few registers.
template <typename T>
__device__ __forceinline__ void keep_narrow(Vector<T, kVector<T>>& vector) {
  uint4& word = vector.words[0];
  asm volatile("" : "+r"(word.x), "+r"(word.y), "+r"(word.z), "+r"(word.w));
}

// A CTA a row at a time; a thread has V vectors of a row, blockDim.x apart.
template <typename T, int V, NormKind kKind>
__global__ void __launch_bounds__(kMostThreads, kThreadsOfSm / kMostThreads) stream_rows(const NormCall<T> call) {
  allow_next();
  constexpr int N = kVector<T>;
  __shared__ alignas(16) float shared[4][kWarp];  // two rows in turn
  __shared__ uint32_t shares[kMostShares];
  clear_sums(shared);
  const int first = threadIdx.x * N, step = blockDim.x * N;
  // f(i) for the vectors of this thread that the row has.
  auto each = [&](auto&& f) {
#pragma unroll
    for (int i = 0; i < V; ++i)
      if (first + i * step < call.group) f(i);
  };
  Vector<T, N> weight[V], x[V], next[V];
  if (call.weight) each([&](int i) { weight[i].load(call.weight + first + i * step); });
  const T* in = call.in.at(blockIdx.x, first);
  T* out = call.out.at(blockIdx.x, first);
  const int64_t in_step = gridDim.x * call.in.stride, out_step = gridDim.x * call.out.stride;
  const float share = 1 / static_cast<float>(call.group);
  wait_for_previous();
  each([&](int i) { x[i].load(in + i * step); });
  int parity = 0;
  for (int row = blockIdx.x; row < call.rows; row += gridDim.x, parity ^= 2) {
    in += in_step;
    if (row + gridDim.x < call.rows) each([&](int i) { next[i].load(in + i * step); });

    float mean = 0, squares = 0;
    if constexpr (kKind == NormKind::layer) {
      each([&](int i) {
        float y[N], sum = 0;
        x[i].get(y);
#pragma unroll
        for (int e = 0; e < N; ++e) sum += y[e];
        mean += sum;
      });
      mean = sum_over_run(mean, shared[parity]) * share;
    }
    each([&](int i) {
      float y[N], sum = 0;
      x[i].get(y);
#pragma unroll
      for (int e = 0; e < N; ++e) {
        if constexpr (kKind == NormKind::layer) y[e] -= mean;
        sum += y[e] * y[e];
      }
      squares += sum;
    });
#pragma unroll
    for (int i = 0; i < V; ++i) keep_narrow(weight[i]);
    const float inverse = rsqrtf(sum_over_run(squares, shared[parity + 1]) * share + call.eps);
    each([&](int i) {
      float y[N], w[N];
      x[i].get(y);
#pragma unroll
      for (int e = 0; e < N; ++e) {
        if constexpr (kKind == NormKind::layer) y[e] -= mean;
        y[e] *= inverse;
      }
      if (call.weight) {
        weight[i].get(w);
#pragma unroll
        for (int e = 0; e < N; ++e) y[e] *= w[e] + call.weight_offset;
      }
      if (call.bias) {
        x[i].load(call.bias + first + i * step);
        x[i].get(w);
#pragma unroll
        for (int e = 0; e < N; ++e) y[e] += w[e];
      }
      x[i].set(y);
      x[i].store(out + i * step);
    });
    if constexpr (sizeof(T) == 2)
      if (call.rounded.codes) round_row<T, N, V>(call.rounded, row, call.group, first, step, x, shares);
    each([&](int i) { x[i] = next[i]; });
    out += out_step;
  }
}

int multiprocessors() {
  int device, count;
  MAGA_CUDA(cudaGetDevice(&device));
  MAGA_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

template <typename T, int V>
void launch_rows(const Queue& queue, NormKind kind, const NormCall<T>& call) {
  const int vectors = call.group / kVector<T>;
  const int threads = ((vectors + V - 1) / V + kWarp - 1) / kWarp * kWarp;
  const int ctas = std::min(call.rows, multiprocessors() * (kThreadsOfSm / threads));
  auto* kernel = kind == NormKind::rms ? stream_rows<T, V, NormKind::rms> : stream_rows<T, V, NormKind::layer>;
  launch(queue, kernel, dim3(ctas), dim3(threads), 0, call);
}

}  // namespace

template <typename T>
bool norm_stream(const Queue& queue, NormKind kind, const NormCall<T>& call) {
  const int vectors = call.group / kVector<T>;
  if (call.groups > 1 || vectors * kVector<T> != call.group || vectors > 4 * kMostThreads) return false;
  // Few rows: more threads for each, for latency.
  if (vectors <= kWarp) {
    launch_rows<T, 1>(queue, kind, call);
  } else if (vectors <= 2 * kWarp || (call.rows <= 2 * multiprocessors() && vectors <= 2 * kMostThreads)) {
    launch_rows<T, 2>(queue, kind, call);
  } else {
    launch_rows<T, 4>(queue, kind, call);
  }
  return true;
}

template bool norm_stream(const Queue&, NormKind, const NormCall<float>&);
template bool norm_stream(const Queue&, NormKind, const NormCall<half>&);
template bool norm_stream(const Queue&, NormKind, const NormCall<__nv_bfloat16>&);

}  // namespace maga::cuda
