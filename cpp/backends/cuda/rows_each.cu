// Kernels whose elements do not know each other: embed, activation, bound, add, select, the sum of slabs, and conversions.
#include "backends/cuda/rows_each.cuh"

namespace maga::cuda {
namespace {

template <typename T, int N>
struct Embedding {
  static constexpr int kWidth = N;
  using Operands = Vector<T, N>;
  const T* table;
  const T* virtual_table;
  Rows<T> out;
  int vocab;
  int width;
  float scale;
  const int32_t* ids;
  const int32_t* chosen;

  __device__ __forceinline__ void load(int row, int column, Operands& x) const {
    int32_t id = ids[row];
    if (id < 0) id = chosen[-1 - id];
    x.load(id < vocab ? table + int64_t{id} * width + column : virtual_table + int64_t{id - vocab} * width + column);
  }
  __device__ __forceinline__ void store(int row, int column, Operands& x) const {
    float y[N];
    x.get(y);
    const float factor = ids[row] < vocab ? scale : 1.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] *= factor;
    x.set(y);
    x.store(out.at(row, column));
  }
};

template <typename T>
__device__ __forceinline__ float exponential(float x) {
  if constexpr (std::is_same_v<T, float>) return expf(x);
  return __expf(x);  // its relative error, about 1e-6, is far below the rounding to 16 bits
}

template <typename T, ActivationKind kKind>
__device__ __forceinline__ float activated(float x) {
  if constexpr (kKind == ActivationKind::silu) {
    const float divisor = 1 + exponential<T>(-x);
    return std::is_same_v<T, float> ? x / divisor : __fdividef(x, divisor);
  } else if constexpr (kKind == ActivationKind::gelu) {
    return 0.5f * x * (1 + erff(x * 0.70710678118654752f));
  } else if constexpr (kKind == ActivationKind::gelu_tanh) {
    return 0.5f * x * (1 + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
  } else {
    const float y = x < 0 ? 0 : x;  // NaN stays NaN
    return kKind == ActivationKind::relu2 ? y * y : y;
  }
}

template <typename T, int N, ActivationKind kKind>
struct Activated {
  static constexpr int kWidth = N;
  struct Operands {
    Vector<T, N> gate, up;
  };
  Rows<T> gate, up, out;

  __device__ __forceinline__ void load(int row, int column, Operands& x) const {
    x.gate.load(gate.at(row, column));
    if (up.data) x.up.load(up.at(row, column));
  }
  __device__ __forceinline__ void store(int row, int column, Operands& x) const {
    float y[N], factor[N];
    x.gate.get(y);
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = activated<T, kKind>(y[i]);
    if (up.data) {
      x.up.get(factor);
#pragma unroll
      for (int i = 0; i < N; ++i) y[i] *= factor[i];
    }
    x.gate.set(y);
    x.gate.store(out.at(row, column));
  }
};

template <typename T, int N>
struct Bounded {
  static constexpr int kWidth = N;
  using Operands = Vector<T, N>;
  Rows<T> in, out;
  BoundKind kind;
  float limit;

  __device__ __forceinline__ void load(int row, int column, Operands& x) const { x.load(in.at(row, column)); }
  __device__ __forceinline__ void store(int row, int column, Operands& x) const {
    float y[N];
    x.get(y);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (kind == BoundKind::tanh) {
        y[i] = limit * tanhf(y[i] / limit);
      } else {  // NaN stays NaN
        y[i] = y[i] > limit ? limit : y[i] < -limit ? -limit : y[i];
      }
    }
    x.set(y);
    x.store(out.at(row, column));
  }
};

template <typename T, int N>
struct Sum {
  static constexpr int kWidth = N;
  struct Operands {
    Vector<T, N> a, b;
  };
  Rows<T> a, b, out;

  __device__ __forceinline__ void load(int row, int column, Operands& x) const {
    x.a.load(a.at(row, column));
    x.b.load(b.at(row, column));
  }
  __device__ __forceinline__ void store(int row, int column, Operands& x) const {
    float y[N], z[N];
    x.a.get(y);
    x.b.get(z);
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] += z[i];
    x.a.set(y);
    x.a.store(out.at(row, column));
  }
};

template <typename T, int N>
struct Selected {
  static constexpr int kWidth = N;
  using Operands = Vector<T, N>;
  Rows<T> in, out;
  const int32_t* rows;

  __device__ __forceinline__ void load(int row, int column, Operands& x) const { x.load(in.at(rows[row], column)); }
  __device__ __forceinline__ void store(int row, int column, Operands& x) const { x.store(out.at(row, column)); }
};

template <typename T, int N>
struct Reduced {
  static constexpr int kWidth = N;
  struct Operands {
    float sum[1][N];
    Vector<T, N> bias, residual;
  };
  const float* slabs;
  const T* bias;
  Rows<T> residual, out;
  int count, width;
  int64_t slab_stride;

  __device__ __forceinline__ void load(int row, int column, Operands& x) const {
    if (bias) x.bias.load(bias + column);
    if (residual.data) x.residual.load(residual.at(row, column));
    sum_slabs<8>(slabs, count, slab_stride, {int64_t{row} * width + column}, x.sum);
  }
  __device__ __forceinline__ void store(int row, int column, Operands& x) const {
    float y[N];
    if (bias) {
      x.bias.get(y);
#pragma unroll
      for (int i = 0; i < N; ++i) x.sum[0][i] += y[i];
    }
    if (residual.data) {
      x.residual.get(y);
#pragma unroll
      for (int i = 0; i < N; ++i) x.sum[0][i] += y[i];
    }
    x.bias.set(x.sum[0]);
    x.bias.store(out.at(row, column));
  }
};

template <typename From, typename To, int N>
struct Converted {
  static constexpr int kWidth = N;
  using Operands = Vector<From, N>;
  Rows<From> in;
  Rows<To> out;

  __device__ __forceinline__ void load(int row, int column, Operands& x) const { x.load(in.at(row, column)); }
  __device__ __forceinline__ void store(int row, int column, Operands& x) const {
    float y[N];
    x.get(y);
    Vector<To, N> result;
    result.set(y);
    result.store(out.at(row, column));
  }
};

template <typename From, typename To>
void convert(const Queue& queue, const Matrix& in, const Matrix& out, int64_t rows, int width) {
  constexpr int kWide = 4;
  const bool vectors = takes_vectors<From>(in, width, kWide) && takes_vectors<To>(out, width, kWide);
  if (vectors) {
    launch_each(queue, Converted<From, To, kWide>{Rows<From>(in), Rows<To>(out)}, static_cast<int>(rows), width);
  } else {
    launch_each(queue, Converted<From, To, 1>{Rows<From>(in), Rows<To>(out)}, static_cast<int>(rows), width);
  }
}

template <typename T, ActivationKind kKind>
void launch_activation(const Queue& queue, const ActivationArgs& args) {
  with_vector<T>(
      [&](int n) {
        return takes_vectors<T>(args.gate, args.width, n) && takes_vectors<T>(args.up, args.width, n) &&
               takes_vectors<T>(args.out, args.width, n);
      },
      [&](auto n) {
        launch_each(queue, Activated<T, n(), kKind>{Rows<T>(args.gate), Rows<T>(args.up), Rows<T>(args.out)}, args.rows,
                    args.width);
      });
}

}  // namespace

void embed(const Queue& queue, DType type, const DeviceStep& step, const EmbedArgs& args) {
  with_type(type, [&](auto element) {
    using T = decltype(element);
    const Matrix table{const_cast<void*>(args.table), args.width}, virtual_table{const_cast<void*>(args.virtual_table), args.width};
    with_vector<T>(
        [&](int n) {
          return takes_vectors<T>(table, args.width, n) && takes_vectors<T>(virtual_table, args.width, n) &&
                 takes_vectors<T>(args.out, args.width, n);
        },
        [&](auto n) {
          launch_each(queue,
                      Embedding<T, n()>{static_cast<const T*>(args.table), static_cast<const T*>(args.virtual_table),
                                        Rows<T>(args.out), args.vocab, args.width, args.scale, step.ids, step.chosen},
                      step.tokens, args.width);
        });
  });
}

void activation(const Queue& queue, DType type, const ActivationArgs& args) {
  with_type(type, [&](auto element) {
    using T = decltype(element);
    switch (args.kind) {
      case ActivationKind::silu: return launch_activation<T, ActivationKind::silu>(queue, args);
      case ActivationKind::gelu: return launch_activation<T, ActivationKind::gelu>(queue, args);
      case ActivationKind::gelu_tanh: return launch_activation<T, ActivationKind::gelu_tanh>(queue, args);
      case ActivationKind::relu: return launch_activation<T, ActivationKind::relu>(queue, args);
      case ActivationKind::relu2: return launch_activation<T, ActivationKind::relu2>(queue, args);
    }
  });
}

void bound(const Queue& queue, DType type, const BoundArgs& args) {
  with_type(type, [&](auto element) {
    using T = decltype(element);
    with_vector<T>([&](int n) { return takes_vectors<T>(args.in, args.width, n) && takes_vectors<T>(args.out, args.width, n); },
                   [&](auto n) {
                     launch_each(queue, Bounded<T, n()>{Rows<T>(args.in), Rows<T>(args.out), args.kind, args.limit}, args.rows,
                                 args.width);
                   });
  });
}

void add(const Queue& queue, DType type, const AddArgs& args) {
  with_type(type, [&](auto element) {
    using T = decltype(element);
    with_vector<T>(
        [&](int n) {
          return takes_vectors<T>(args.a, args.width, n) && takes_vectors<T>(args.b, args.width, n) &&
                 takes_vectors<T>(args.out, args.width, n);
        },
        [&](auto n) {
          launch_each(queue, Sum<T, n()>{Rows<T>(args.a), Rows<T>(args.b), Rows<T>(args.out)}, args.rows, args.width);
        });
  });
}

void select(const Queue& queue, DType type, const DeviceStep& step, const SelectArgs& args) {
  with_type(type, [&](auto element) {
    using T = decltype(element);
    with_vector<T>([&](int n) { return takes_vectors<T>(args.in, args.width, n) && takes_vectors<T>(args.out, args.width, n); },
                   [&](auto n) {
                     launch_each(queue, Selected<T, n()>{Rows<T>(args.in), Rows<T>(args.out), step.logit_rows}, step.rows,
                                 args.width);
                   });
  });
}

void reduce(const Queue& queue, DType type, const ReduceArgs& args) {
  with_type(type, [&](auto element) {
    using T = decltype(element);
    auto fits = [&](int n) {
      return takes_vectors<float>(args.slabs.data, n) && takes_vectors<T>(args.slabs.bias, n) &&
             takes_vectors<T>(args.residual, args.width, n) && takes_vectors<T>(args.out, args.width, n);
    };
    auto launch_body = [&](auto n) {
      launch_each(queue,
                  Reduced<T, n()>{args.slabs.data, static_cast<const T*>(args.slabs.bias), Rows<T>(args.residual),
                                  Rows<T>(args.out), args.slabs.count, args.width, int64_t{args.rows} * args.width},
                  args.rows, args.width);
    };
    if (fits(4)) {  // floats: the slabs are most of the bytes
      launch_body(Constant<4>{});
    } else {
      launch_body(Constant<1>{});
    }
  });
}

void widen(const Queue& queue, DType type, Matrix in, float* out, int64_t rows, int width) {
  with_type(type, [&](auto element) { convert<decltype(element), float>(queue, in, {out, width}, rows, width); });
}

void narrow(const Queue& queue, DType type, const float* in, Matrix out, int64_t rows, int width) {
  with_type(type,
            [&](auto element) { convert<float, decltype(element)>(queue, {const_cast<float*>(in), width}, out, rows, width); });
}

}  // namespace maga::cuda
