// Norm of rows or of groups of columns, with the sum of a split linear in front of it where that is wanted.
#include <algorithm>

#include "backends/cuda/rows_norm.cuh"

namespace maga::cuda {
namespace {

constexpr int kMostThreads = 1024;
constexpr int kFewSlabs = 2;

// One run of columns: where its vectors lie, and how one of them is computed from what comes in.
// kAhead: slabs under way at a time; 0: no slabs.
template <typename T, int N, int kAhead>
struct Run {
  const NormCall<T>& call;
  int64_t row;
  int first;  // column
  int own;    // of its weight and bias

  // kRuns vectors of the input from the v-th on, `gap` columns apart, as floats that `T` holds exactly.
  template <int kRuns>
  __device__ __forceinline__ void read(int v, int gap, float (&x)[kRuns][N]) const {
    const int column = first + v * N;
    Vector<T, N> vector[kRuns];
    if constexpr (kAhead == 0) {
#pragma unroll
      for (int r = 0; r < kRuns; ++r) vector[r].load(call.in.at(row, column + r * gap));
#pragma unroll
      for (int r = 0; r < kRuns; ++r) vector[r].get(x[r]);
    } else {
      Vector<T, N> bias[kRuns];
#pragma unroll
      for (int r = 0; r < kRuns; ++r) {
        if (call.residual.data) vector[r].load(call.residual.at(row, column + r * gap));
        if (call.slab_bias) bias[r].load(call.slab_bias + column + r * gap);
      }
      const int64_t width = int64_t{call.groups} * call.group;
      sum_slabs<kAhead>(call.slabs, call.slab_count, call.rows * width, {row * width + column, gap}, x);
#pragma unroll
      for (int r = 0; r < kRuns; ++r) {
        float y[N];
        if (call.slab_bias) {
          bias[r].get(y);
#pragma unroll
          for (int i = 0; i < N; ++i) x[r][i] += y[i];
        }
        if (call.residual.data) {
          vector[r].get(y);
#pragma unroll
          for (int i = 0; i < N; ++i) x[r][i] += y[i];
        }
#pragma unroll
        for (int i = 0; i < N; ++i) x[r][i] = rounded<T>(x[r][i]);
      }
    }
  }
  // With slabs, what was read goes to `sum` as well; after all loads of a thread.
  __device__ __forceinline__ void store_sum(int v, const float (&x)[N]) const {
    if constexpr (kAhead > 0) {
      Vector<T, N> vector;
      vector.set(x);
      vector.store(call.sum.at(row, first + v * N));
    }
  }
  // The same again, for runs too long for registers.
  __device__ __forceinline__ void read_again(int v, float (&x)[N]) const {
    Vector<T, N> vector;
    vector.load((kAhead > 0 ? call.sum : call.in).at(row, first + v * N));
    vector.get(x);
  }
  __device__ __forceinline__ Vector<T, N> write(int v, const float (&x)[N], float mean, float inverse,
                                                const Vector<T, N>& weight) const {
    float y[N], w[N];
    weight.get(w);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      y[i] = (x[i] - mean) * inverse;
      if (call.weight) y[i] *= w[i] + call.weight_offset;
    }
    Vector<T, N> vector;
    if (call.bias) {
      vector.load(call.bias + own + v * N);
      vector.get(w);
#pragma unroll
      for (int i = 0; i < N; ++i) y[i] += w[i];
    }
    vector.set(y);
    vector.store(call.out.at(row, first + v * N));
    return vector;
  }
};

// A run a CTA, or a run a warp (blockDim.x == 32). A thread keeps V vectors of its run in registers; V == 0: it reads them again.
template <typename T, int N, int V, int kAhead, NormKind kKind>
__global__ void __launch_bounds__(kMostThreads) norm(const NormCall<T> call) {
  allow_next();
  __shared__ alignas(16) float shared[2][kWarp];
  if (blockDim.y == 1) clear_sums(shared);
  const int vectors = call.group / N;
  const int run_index = blockIdx.x * blockDim.y + threadIdx.y;
  const int row = call.groups == 1 ? run_index : run_index / call.groups;
  const int of_row = run_index - row * call.groups;
  const Run<T, N, kAhead> run{call, row, of_row * call.group, kAhead == 0 ? of_row * call.own : 0};

  Vector<T, N> weight[V > 0 ? V : 1];
  if (V > 0 && call.weight) {
#pragma unroll
    for (int i = 0; i < V; ++i)
      if (const int v = threadIdx.x + i * blockDim.x; v < vectors) weight[i].load(call.weight + run.own + v * N);
  }
  wait_for_previous();
  if (row >= call.rows) return;

  float x[V > 0 ? V : 1][N];
  // Folds f over the columns of this thread; `again`: they have been read before.
  auto each = [&](bool again, auto&& f) {
    if constexpr (V > 0) {
      if (const int v = threadIdx.x; !again && v < vectors)  // all at once; a second one past the end is the first again
        run.read(v, v + blockDim.x < vectors ? blockDim.x * N : 0, x);
#pragma unroll
      for (int i = 0; i < V; ++i)
        if (const int v = threadIdx.x + i * blockDim.x; v < vectors) {
          if (!again) run.store_sum(v, x[i]);
#pragma unroll
          for (int e = 0; e < N; ++e) f(x[i][e]);
        }
    } else {
      for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
        if (again) {
          run.read_again(v, x[0]);
        } else {
          run.read(v, 0, x);
          run.store_sum(v, x[0]);
        }
#pragma unroll
        for (int e = 0; e < N; ++e) f(x[0][e]);
      }
    }
  };
  float mean = 0, squares = 0;
  if constexpr (kKind == NormKind::layer) {
    each(false, [&](float y) { mean += y; });
    mean = sum_over_run(mean, shared[0]) / static_cast<float>(call.group);
    each(true, [&](float y) { squares += (y - mean) * (y - mean); });
  } else {
    each(false, [&](float y) { squares += y * y; });
  }
  const float inverse = 1 / sqrtf(sum_over_run(squares, shared[1]) / static_cast<float>(call.group) + call.eps);
  if constexpr (V > 0) {
    Vector<T, N> written[V];
#pragma unroll
    for (int i = 0; i < V; ++i)
      if (const int v = threadIdx.x + i * blockDim.x; v < vectors) written[i] = run.write(v, x[i], mean, inverse, weight[i]);
    if constexpr (sizeof(T) == 2 && N > 2)
      if (call.rounded.codes) {
        __shared__ uint32_t shares[kMostShares];
        round_row<T, N, V>(call.rounded, row, call.group, threadIdx.x * N, blockDim.x * N, written, shares);
      }
  } else {
    for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
      run.read_again(v, x[0]);
      if (call.weight) weight[0].load(call.weight + run.own + v * N);
      run.write(v, x[0], mean, inverse, weight[0]);
    }
  }
}

struct NormShape {
  int vectors_a_thread;  // 1, 2; 0: more
  dim3 grid, block;
};

NormShape shape_of(int rows, int groups, int vectors, int ahead) {
  const int64_t runs = int64_t{rows} * groups;
  constexpr int kSms = 132;
  if (groups > 1 && vectors <= 2 * kWarp) return {vectors <= kWarp ? 1 : 2, dim3((runs + 7) / 8), dim3(kWarp, 8)};
  // A CTA an SM: a thread for every vector, for latency; but few rows with few slabs, and many rows, go faster with two a thread.
  const bool alone = runs <= kSms && vectors <= kMostThreads && !(ahead == kFewSlabs && runs < 32);
  const int per_thread = alone ? 1 : vectors <= 2 * kMostThreads ? 2 : 0;
  const int threads = per_thread == 0 ? kMostThreads : (vectors + per_thread - 1) / per_thread;
  return {per_thread, dim3(runs), dim3((threads + kWarp - 1) / kWarp * kWarp)};
}

template <typename T, int N, int kAhead, NormKind kKind>
void launch_norm(const Queue& queue, const NormCall<T>& call) {
  const NormShape shape = shape_of(call.rows, call.groups, call.group / N, kAhead);
  auto* kernel = shape.vectors_a_thread == 1   ? norm<T, N, 1, kAhead, kKind>
                 : shape.vectors_a_thread == 2 ? norm<T, N, 2, kAhead, kKind>
                                               : norm<T, N, 0, kAhead, kKind>;
  launch(queue, kernel, shape.grid, shape.block, 0, call);
}

template <typename T, int N, int kAhead>
void launch_norm(const Queue& queue, NormKind kind, const NormCall<T>& call) {
  if (kind == NormKind::rms) {
    launch_norm<T, N, kAhead, NormKind::rms>(queue, call);
  } else {
    launch_norm<T, N, kAhead, NormKind::layer>(queue, call);
  }
}

// Whether columns go n at a time. With slabs, vectors of 4 floats: the slabs are most of the bytes, and more threads fetch them
// sooner.
template <typename T>
bool fits(const NormArgs& args, int n) {
  return args.group % n == 0 && takes_vectors<T>(args.out, args.width, n) && takes_vectors<T>(args.weight, n) &&
         takes_vectors<T>(args.bias, n) &&
         (args.slabs.data ? takes_vectors<T>(args.sum, args.width, n) && takes_vectors<T>(args.residual, args.width, n) &&
                                takes_vectors<T>(args.slabs.bias, n) && takes_vectors<float>(args.slabs.data, n)
                          : takes_vectors<T>(args.in, args.width, n));
}

}  // namespace

bool norm_rounds(DType type, const NormArgs& args) {
  if (type == DType::f32 || args.group != args.width || args.width > kMostRoundedColumns) return false;
  bool rounds = false;
  with_type(type, [&](auto element) { rounds = fits<decltype(element)>(args, args.slabs.data ? 4 : 8); });
  return rounds;
}

void norm(const Queue& queue, DType type, const NormArgs& args) {
  if (args.rows == 0) return;
  MAGA_CHECK(args.group > 0 && args.width % args.group == 0, "groups of ", args.group, " in a width of ", args.width);
  const bool slabs = args.slabs.data;
  MAGA_CHECK(!slabs || (args.group == args.width && args.own == 0), "slabs and groups");
  MAGA_CHECK(!args.rounded.codes || norm_rounds(type, args), "rounded rows of ", args.width, " columns");
  with_type(type, [&](auto element) {
    using T = decltype(element);
    const NormCall<T> call{.in = Rows<T>(args.in),
                           .out = Rows<T>(args.out),
                           .residual = Rows<T>(args.residual),
                           .sum = Rows<T>(args.sum),
                           .weight = static_cast<const T*>(args.weight),
                           .bias = static_cast<const T*>(args.bias),
                           .slabs = args.slabs.data,
                           .slab_bias = static_cast<const T*>(args.slabs.bias),
                           .slab_count = args.slabs.count,
                           .rows = args.rows,
                           .groups = args.width / args.group,
                           .group = args.group,
                           .own = args.own,
                           .eps = args.eps,
                           .weight_offset = args.weight_offset,
                           .rounded = args.rounded};
    if (slabs) {
      // The more slabs under way, the more registers, and the less of an SM is left to the next kernel, which fetches its weights.
      if (!fits<T>(args, 4)) return launch_norm<T, 1, kFewSlabs>(queue, args.kind, call);
      args.slabs.count <= kFewSlabs ? launch_norm<T, 4, kFewSlabs>(queue, args.kind, call)
                                    : launch_norm<T, 4, 8>(queue, args.kind, call);
    } else {
      if (!fits<T>(args, kVector<T>)) return launch_norm<T, 1, 0>(queue, args.kind, call);
      if (!norm_stream(queue, args.kind, call)) launch_norm<T, kVector<T>, 0>(queue, args.kind, call);
    }
  });
}

}  // namespace maga::cuda
