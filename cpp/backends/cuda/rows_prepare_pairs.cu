// prepare_pairs: heads in registers, a thread having the columns that are rotated together.
#include <algorithm>
#include <bit>

#include "backends/cuda/rows_prepare.cuh"

namespace maga::cuda {
namespace {

constexpr int kMostThreads = 128;

template <typename T, int N>
struct Pair {
  Vector<T, N> first, second;  // from column c, and from c + head_dim / 2

  __device__ __forceinline__ void load(const T* from, int half) {
    first.load(from);
    second.load(from + half);
  }
  __device__ __forceinline__ void store(T* to, int half) const {
    first.store(to);
    second.store(to + half);
  }
  __device__ __forceinline__ void get(float (&a)[N], float (&b)[N]) const {
    first.get(a);
    second.get(b);
  }
  __device__ __forceinline__ void set(const float (&a)[N], const float (&b)[N]) {
    first.set(a);
    second.set(b);
  }
};

// CTAs an SM that registers must leave room for.
template <typename KV>
constexpr int most_ctas(int heads, bool norms) {
  return heads == 1 ? 6 : norms ? 4 : std::is_same_v<KV, Code> ? 5 : 6;
}

// A team of 1 << log_lanes threads a head; a thread has 2 N of its columns, of kHeads heads of one row. Grid (rows, parts of a
// row's heads).
template <typename T, typename KV, int N, int kHeads, bool kSlabs, bool kNorms>
__global__ void __launch_bounds__(kMostThreads, most_ctas<KV>(kHeads, kNorms))
    prepare_pairs(const PrepareCall<T, KV> call, int log_lanes) {
  const int team = threadIdx.x >> log_lanes, teams = blockDim.x >> log_lanes;
  const int c = (threadIdx.x & ((1 << log_lanes) - 1)) * N, half = call.head_dim / 2;
  const int row = blockIdx.x, first = blockIdx.y * teams * kHeads + team;
  const int k_heads = call.heads + call.kv_heads, all_heads = k_heads + call.kv_heads;
  auto gain_of = [&](int head) { return head < call.heads ? call.q_norm : head < k_heads ? call.k_norm : nullptr; };
  // f(i, head) for the heads of this thread.
  auto each = [&](auto&& f) {
#pragma unroll
    for (int i = 0; i < kHeads; ++i)
      if (const int head = first + i * teams; head < all_heads) f(i, head);
  };
  // One head a thread: what no kernel writes is asked for while the one in front still runs.
  Pair<T, N> gain, bias;
  if constexpr (kHeads == 1)
    each([&](int, int head) {
      if (const T* weight = kNorms ? gain_of(head) : nullptr) gain.load(weight + c, half);
      if (kSlabs && call.slab_bias) bias.load(call.slab_bias + head * call.head_dim + c, half);
    });
  wait_for_previous();
  allow_next();  // see AttentionArgs::after_prepare

  const int64_t slot = call.slots[row];
  Vector<float, 2 * N> turns;
  if (call.rotary_dim > 0) turns.load(reinterpret_cast<const float*>(call.turns + int64_t{row} * half + c));
  Pair<T, N> in[kHeads];
  float a[N], b[N];
  T* const q = call.q.at(row, c);
  if constexpr (kSlabs) {
    static_assert(kHeads == 1);
    each([&](int, int head) {
      const int64_t width = int64_t{all_heads} * call.head_dim;
      float x[2][N];
      sum_slabs<4>(call.slabs, call.slab_count, call.rows * width, {row * width + head * call.head_dim + c, half}, x);
      if (call.slab_bias) {
        bias.get(a, b);
#pragma unroll
        for (int e = 0; e < N; ++e) x[0][e] += a[e], x[1][e] += b[e];
      }
      in[0].set(x[0], x[1]);
    });
  } else {
    const T* const k = call.k.at(row, c);
    const T* const v = call.v.at(row, c);
    each([&](int i, int head) {
      const T* from = head < call.heads ? q : head < k_heads ? k - call.heads * call.head_dim : v - k_heads * call.head_dim;
      in[i].load(from + head * call.head_dim, half);
    });
  }
  const float share = 1 / static_cast<float>(call.head_dim);
  const int64_t page = slot >> call.page_shift, place = slot & ((int64_t{1} << call.page_shift) - 1);
  const int64_t entry = page * call.page_stride + place * call.head_dim + c;
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int head = first + i * teams;
    if constexpr (kNorms) {  // all threads of a warp, for the sum
      const T* const weight = head < all_heads ? gain_of(head) : nullptr;
      if (kHeads > 1 && weight) gain.load(weight + c, half);
      in[i].get(a, b);
      float squares = 0;
#pragma unroll
      for (int e = 0; e < N; ++e) squares += a[e] * a[e] + b[e] * b[e];
      for (int offset = 1 << log_lanes >> 1; offset > 0; offset >>= 1) squares += __shfl_xor_sync(~0u, squares, offset);
      if (weight) {
        const float inverse = rsqrtf(squares * share + call.eps);
        float w[N], z[N];
        gain.get(w, z);
#pragma unroll
        for (int e = 0; e < N; ++e) {
          a[e] *= inverse * (w[e] + call.weight_offset);
          b[e] *= inverse * (z[e] + call.weight_offset);
        }
        in[i].set(a, b);
      }
    }
    if (head >= all_heads) continue;
    if (call.rotary_dim > 0 && head < k_heads) {
      float turn[2 * N];
      turns.get(turn);
      in[i].get(a, b);
#pragma unroll
      for (int e = 0; e < N; ++e) {
        const float one = a[e], cosine = turn[2 * e], sine = turn[2 * e + 1];
        a[e] = one * cosine - b[e] * sine;
        b[e] = b[e] * cosine + one * sine;
      }
      in[i].set(a, b);
    }
    if (head < call.heads) {
      in[i].store(q + head * call.head_dim, half);
    } else if (slot >= 0) {
      const bool is_k = head < k_heads;
      const int kv_head = head - (is_k ? call.heads : k_heads);
      KV* const pages = is_k ? call.k_pages + kv_head * call.k_head_stride : call.v_pages + kv_head * call.v_head_stride;
      if constexpr (std::is_same_v<KV, Code>) {
        in[i].get(a, b);
        uint32_t magnitude = 0;
#pragma unroll
        for (int e = 0; e < N; ++e) magnitude = max(magnitude, max(magnitude_bits(a[e]), magnitude_bits(b[e])));
        const int lanes = 1 << log_lanes;
        magnitude = team_max(magnitude, lanes, team_mask_of(lanes));
        const float scale = call.scale(is_k, kv_head, page, place, magnitude, c == 0);
        store_codes(call.code, a, scale, pages + entry);
        store_codes(call.code, b, scale, pages + entry + half);
      } else {
        in[i].store(pages + entry, half);
      }
      if (!kSlabs && call.keep_k && is_k) in[i].store(call.k.at(row, c) + (head - call.heads) * call.head_dim, half);
    }
  }
}

template <typename T, typename KV, int N, int kHeads, bool kSlabs>
void launch_pairs(const Queue& queue, const PrepareCall<T, KV>& call) {
  const int lanes = call.head_dim / (2 * N), heads = call.heads + 2 * call.kv_heads;
  const int threads_a_row = (heads + kHeads - 1) / kHeads * lanes;
  const int parts = (threads_a_row + kMostThreads - 1) / kMostThreads;
  const int threads = ((threads_a_row + parts - 1) / parts + kWarp - 1) / kWarp * kWarp;
  auto* kernel =
      call.q_norm || call.k_norm ? prepare_pairs<T, KV, N, kHeads, kSlabs, true> : prepare_pairs<T, KV, N, kHeads, kSlabs, false>;
  launch(queue, kernel, dim3(call.rows, parts), dim3(threads), 0, call, std::countr_zero(static_cast<unsigned>(lanes)));
}

}  // namespace

template <typename T, typename KV>
bool prepare_pairs(const Queue& queue, const PrepareCall<T, KV>& call) {
  const int n = call.slabs ? 4 : kVector<T>, lanes = call.head_dim / (2 * n);
  if (call.head_dim % (2 * n) != 0 || !std::has_single_bit(static_cast<unsigned>(lanes)) || lanes > kWarp) return false;
  if (call.v_dim != call.head_dim || (call.rotary_dim > 0 && (call.interleaved || call.rotary_dim != call.head_dim))) return false;
  const int64_t threads = int64_t{call.rows} * (call.heads + 2 * call.kv_heads) * lanes;
  if (call.slabs) {
    launch_pairs<T, KV, 4, 1, true>(queue, call);
  } else if (threads <= 132 * 1024) {  // few: spread over the SMs
    launch_pairs<T, KV, kVector<T>, 1, false>(queue, call);
  } else {
    launch_pairs<T, KV, kVector<T>, 4, false>(queue, call);
  }
  return true;
}

template bool prepare_pairs(const Queue&, const PrepareCall<float, float>&);
template bool prepare_pairs(const Queue&, const PrepareCall<half, half>&);
template bool prepare_pairs(const Queue&, const PrepareCall<__nv_bfloat16, __nv_bfloat16>&);
template bool prepare_pairs(const Queue&, const PrepareCall<float, Code>&);
template bool prepare_pairs(const Queue&, const PrepareCall<half, Code>&);
template bool prepare_pairs(const Queue&, const PrepareCall<__nv_bfloat16, Code>&);

}  // namespace maga::cuda
