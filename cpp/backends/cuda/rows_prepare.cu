// prepare_qkv: what happens to q, k and v between their linear and attention.
#include <algorithm>
#include <bit>

#include "backends/cuda/rows_prepare.cuh"

namespace maga::cuda {
namespace {

constexpr int kMostThreads = 128;

// The head of q, k or v that a team of threads works on.
template <typename T, typename KV>
struct Head {
  enum Part { kQ, kK, kV } part;
  int head;    // of its part
  int width;   // head_dim or v_dim
  int column;  // in a row (q | k | v)

  __device__ __forceinline__ Head(const PrepareCall<T, KV>& call, int index) {
    part = index < call.heads ? kQ : index < call.heads + call.kv_heads ? kK : kV;
    head = index - (part == kQ ? 0 : part == kK ? call.heads : call.heads + call.kv_heads);
    width = part == kV ? call.v_dim : call.head_dim;
    column = part == kV ? (call.heads + call.kv_heads) * call.head_dim + head * call.v_dim : index * call.head_dim;
  }
};

// Brings a line that no kernel of the step writes nearer while the kernel in front still runs.
__device__ __forceinline__ void prefetch(const void* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }

// Turns y, the columns from c on of a head. `turns` are those of its first pair; vectors that lie in one half of a rotation take
// `near`, which turns_of found.
template <int N, typename Call>
struct Turning {
  const Call& call;
  const float* head;
  const float2* turns;
  const int half;
  const bool halves;  // a vector lies in one half of the rotation or in none

  __device__ __forceinline__ Turning(const Call& call, const float* head, int row)
      : call(call),
        head(head),
        turns(call.turns + int64_t{row} * (call.rotary_dim / 2)),
        half(call.rotary_dim / 2),
        halves(!call.interleaved && half % N == 0) {}

  __device__ __forceinline__ void turns_of(int c, Vector<float, 2 * N>& near) const {
    if (halves && c < call.rotary_dim) near.load(reinterpret_cast<const float*>(turns + (c >= half ? c - half : c)));
  }
  __device__ __forceinline__ void turn(int c, const Vector<float, 2 * N>& near, float (&y)[N]) const {
    if (c >= call.rotary_dim) return;
    if (halves) {
      const bool second = c >= half;
      Vector<float, N> other;
      other.load(head + (second ? c - half : c + half));
      float z[N], t[2 * N];
      other.get(z);
      near.get(t);
#pragma unroll
      for (int i = 0; i < N; ++i) y[i] = y[i] * t[2 * i] + z[i] * (second ? t[2 * i + 1] : -t[2 * i + 1]);
      return;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int at = c + i;
      if (at >= call.rotary_dim) continue;
      const bool second = call.interleaved ? at % 2 == 1 : at >= half;
      const float other = head[call.interleaved ? at ^ 1 : second ? at - half : at + half];
      const float2 turn = turns[call.interleaved ? at / 2 : second ? at - half : at];
      y[i] = y[i] * turn.x + other * (second ? turn.y : -turn.y);
    }
  }
};

// A team of `lanes` threads (a power of two, at most a warp) a head. The head passes through shared memory as floats, so that a
// column finds the one that it is rotated with wherever that lies. kSingle: a thread has one vector of its head at most, and
// asks for all that belongs to it at once.
template <typename T, typename KV, int N, bool kSlabs, bool kSingle>
__global__ void __launch_bounds__(kMostThreads, kSlabs ? 4 : 7)
    prepare_heads(const PrepareCall<T, KV> call, int lanes, int padded_width) {
  extern __shared__ float4 staging[];
  const int team = threadIdx.x / lanes, lane = threadIdx.x % lanes;
  float* stage = reinterpret_cast<float*>(staging) + team * padded_width;
  const int heads = call.heads + call.kv_heads + call.v_heads;
  const int index = blockIdx.x * (blockDim.x / lanes) + team;
  const int row = index / heads;
  const Head<T, KV> head(call, index - row * heads);
  const T* weight = head.part == head.kQ ? call.q_norm : head.part == head.kK ? call.k_norm : nullptr;
  const bool turned = head.part != head.kV && call.rotary_dim > 0;
  for (int c = lane * N; c < head.width; c += lanes * N) {
    if (weight) prefetch(weight + c);
    if (kSlabs && call.slab_bias) prefetch(call.slab_bias + head.column + c);
  }
  wait_for_previous();
  allow_next();  // see AttentionArgs::after_prepare

  if (row >= call.rows) return;
  const int64_t slot = head.part == head.kQ ? 0 : call.slots[row];
  if (slot < 0) return;
  const unsigned team_mask = team_mask_of(lanes);
  const int width = head.width;
  T* const source = head.part == head.kQ   ? call.q.at(row, head.head * call.head_dim)
                    : head.part == head.kK ? call.k.at(row, head.head * call.head_dim)
                                           : call.v.at(row, head.head * call.v_dim);
  const Turning<N, PrepareCall<T, KV>> turning(call, stage, row);
  auto each = [&](auto&& body) {
    if constexpr (kSingle) {
      if (lane * N < width) body(lane * N);
    } else {
      for (int c = lane * N; c < width; c += lanes * N) body(c);
    }
  };
  float x[N], squares = 0;
  Vector<T, N> gain;
  Vector<float, N> staged;
  Vector<float, 2 * N> turns;
  each([&](int c) {
    Vector<T, N> vector;
    if constexpr (kSingle) {
      if (weight) gain.load(weight + c);
      if (turned) turning.turns_of(c, turns);
    }
    if constexpr (kSlabs) {
      const int64_t slab_width = int64_t{call.heads + call.kv_heads} * call.head_dim + int64_t{call.kv_heads} * call.v_dim;
      if (call.slab_bias) vector.load(call.slab_bias + head.column + c);
      float total[1][N];
      sum_slabs<8>(call.slabs, call.slab_count, call.rows * slab_width, {row * slab_width + head.column + c}, total);
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = total[0][i];
      if (call.slab_bias) {
        float bias[N];
        vector.get(bias);
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] += bias[i];
      }
      vector.set(x);
    } else {
      vector.load(source + c);
    }
    vector.get(x);
#pragma unroll
    for (int i = 0; i < N; ++i) squares += x[i] * x[i];
    if (!kSingle || (turned && !weight)) {
      staged.set(x);
      staged.store(stage + c);
    }
  });
  if (weight) {
    for (int offset = lanes / 2; offset > 0; offset /= 2) squares += __shfl_xor_sync(team_mask, squares, offset);
    const float inverse = 1 / sqrtf(squares / static_cast<float>(call.head_dim) + call.eps);
    each([&](int c) {
      if constexpr (!kSingle) {
        gain.load(weight + c);
        staged.load(stage + c);
        staged.get(x);
      }
      float w[N];
      gain.get(w);
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = rounded<T>(x[i] * (inverse * (w[i] + call.weight_offset)));
      staged.set(x);
      staged.store(stage + c);
    });
  }
  __syncwarp(team_mask);
  auto finished = [&](int c) {  // columns of the result
    if constexpr (!kSingle) {
      staged.load(stage + c);
      staged.get(x);
      if (turned) turning.turns_of(c, turns);
    }
    float y[N];
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = x[i];
    if (turned) turning.turn(c, turns, y);
    Vector<T, N> vector;
    vector.set(y);
    return vector;
  };
  const bool is_k = head.part == head.kK;
  const int64_t page = slot >> call.page_shift, place = slot & ((int64_t{1} << call.page_shift) - 1);
  KV* const entry = (is_k ? call.k_pages : call.v_pages) + page * call.page_stride +
                    head.head * (is_k ? call.k_head_stride : call.v_head_stride) + place * head.width;
  Vector<T, N> vector;
  uint32_t magnitude = 0;
  each([&](int c) {
    vector = finished(c);
    if (head.part == head.kQ || (!kSlabs && call.keep_k && is_k)) vector.store(source + c);
    if (head.part == head.kQ) return;
    float y[N];
    vector.get(y);
    if constexpr (std::is_same_v<KV, Code>) {
#pragma unroll
      for (int i = 0; i < N; ++i) magnitude = max(magnitude, magnitude_bits(y[i]));
    } else {
      Vector<KV, N> stored;
      stored.set(y);
      stored.store(entry + c);
    }
  });
  if constexpr (std::is_same_v<KV, Code>) {
    if (head.part == head.kQ) return;
    const float scale = call.scale(is_k, head.head, page, place, team_max(magnitude, lanes, team_mask), lane == 0);
    each([&](int c) {
      if constexpr (!kSingle) vector = finished(c);
      float y[N];
      vector.get(y);
      store_codes(call.code, y, scale, entry + c);
    });
  }
}

template <typename T, typename KV, int N, bool kSlabs>
void launch_prepare(const Queue& queue, const PrepareCall<T, KV>& call) {
  const int widest = std::max(call.head_dim, call.v_dim);
  int lanes = 4;
  while (lanes < kWarp && lanes * N < widest) lanes *= 2;
  const int64_t teams = int64_t{call.rows} * (call.heads + call.kv_heads + call.v_heads);
  MAGA_CHECK(teams < int64_t{1} << 31, call.rows, " rows");
  const int threads = teams * lanes <= 132 * 256 ? 64 : kMostThreads;  // few: spread over the SMs
  const int teams_a_block = threads / lanes, padded_width = (widest + 3) / 4 * 4;
  const size_t shared = size_t(teams_a_block) * padded_width * sizeof(float);
  MAGA_CHECK(shared <= 48 << 10, "heads of ", widest);
  auto* kernel = lanes * N >= widest ? prepare_heads<T, KV, N, kSlabs, true> : prepare_heads<T, KV, N, kSlabs, false>;
  launch(queue, kernel, dim3((teams + teams_a_block - 1) / teams_a_block), dim3(threads), shared, call, lanes, padded_width);
}

template <typename T, typename KV>
void prepare(const Queue& queue, const DeviceStep& step, const PrepareArgs& args) {
  const KvLayer& layer = args.layer;
  const PrepareCall<T, KV> call{.q = Rows<T>(args.q),
                                .k = Rows<T>(args.k),
                                .v = Rows<T>(args.v),
                                .slabs = args.slabs.data,
                                .slab_bias = static_cast<const T*>(args.slabs.bias),
                                .slab_count = args.slabs.count,
                                .rows = args.rows,
                                .heads = args.heads,
                                .kv_heads = args.kv_heads,
                                .v_heads = layer.values_in_keys ? 0 : args.kv_heads,
                                .head_dim = layer.head_dim,
                                .v_dim = layer.v_dim,
                                .q_norm = static_cast<const T*>(args.q_norm),
                                .k_norm = static_cast<const T*>(args.k_norm),
                                .eps = args.eps,
                                .weight_offset = args.weight_offset,
                                .rotary_dim = args.turns ? args.rotary_dim : 0,
                                .interleaved = args.interleaved,
                                .keep_k = args.keep_k,
                                .turns = args.turns,
                                .k_pages = static_cast<KV*>(layer.k),
                                .v_pages = static_cast<KV*>(layer.v),
                                .page_stride = layer.page_stride,
                                .k_head_stride = layer.k_head_stride,
                                .v_head_stride = layer.v_head_stride,
                                .page_shift = std::countr_zero(static_cast<unsigned>(layer.page_tokens)),
                                .slots = step.slots,
                                .code = args.kv_type,
                                .k_scales = layer.k_scales,
                                .v_scales = layer.v_scales,
                                .scale_stride = layer.scale_stride,
                                .k_scale = layer.k_scale,
                                .v_scale = layer.v_scale};
  const bool slabs = args.slabs.data;
  auto fits = [&](int n) {
    if (args.turns && !takes_vectors<float>(args.turns, 4)) return false;
    const bool norms = takes_vectors<T>(args.q_norm, n) && takes_vectors<T>(args.k_norm, n);
    const bool matrices = slabs ? takes_vectors<float>(args.slabs.data, std::min(n, 4)) && takes_vectors<T>(args.slabs.bias, n)
                                : takes_vectors<T>(args.k, layer.head_dim, n) && takes_vectors<T>(args.v, layer.v_dim, n);
    auto in_pages = [&](const void* pages, int64_t head_stride) {
      return takes_vectors<KV>(pages, std::min<int>(n, kVector<KV>)) && layer.page_stride % n == 0 && head_stride % n == 0;
    };
    return norms && matrices && (args.heads == 0 || takes_vectors<T>(args.q, layer.head_dim, n)) && layer.head_dim % n == 0 &&
           layer.v_dim % n == 0 && in_pages(layer.k, layer.k_head_stride) && in_pages(layer.v, layer.v_head_stride);
  };
  // With slabs, vectors of 4 floats: the slabs are most of the bytes, and more threads fetch them sooner.
  constexpr int kWide = kVector<T>;
  if (!fits(slabs ? 4 : kWide)) {
    slabs ? launch_prepare<T, KV, 1, true>(queue, call) : launch_prepare<T, KV, 1, false>(queue, call);
    return;
  }
  if constexpr (std::is_same_v<T, KV> || std::is_same_v<Code, KV>)
    if (!layer.values_in_keys && prepare_pairs(queue, call)) return;
  slabs ? launch_prepare<T, KV, 4, true>(queue, call) : launch_prepare<T, KV, kWide, false>(queue, call);
}

}  // namespace

void prepare_qkv(const Queue& queue, DType type, const DeviceStep& step, const PrepareArgs& args) {
  if (args.rows == 0 || args.heads + args.kv_heads == 0) return;
  MAGA_CHECK(args.heads == 0 || args.layer.head_dim % 2 == 0 || !args.turns, "rope over heads of ", args.layer.head_dim);
  MAGA_CHECK(std::has_single_bit(static_cast<unsigned>(args.layer.page_tokens)), args.layer.page_tokens, " tokens a page");
  MAGA_CHECK(!args.keep_k || args.slabs.data == nullptr, "slabs have no k to write back");
  with_type(type, [&](auto element) {
    if (is_code(args.kv_type)) return prepare<decltype(element), Code>(queue, step, args);
    with_type(args.kv_type, [&](auto kv) { prepare<decltype(element), decltype(kv)>(queue, step, args); });
  });
}

}  // namespace maga::cuda
