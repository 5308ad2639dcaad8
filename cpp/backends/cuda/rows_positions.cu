// Kernels over rows that read the position of each token: add_positions and log_scale.
#include "backends/cuda/rows_each.cuh"

namespace maga::cuda {
namespace {

template <typename T, int N>
struct PositionsAdded {
  static constexpr int kWidth = N;
  struct Operands {
    Vector<T, N> in, position;
  };
  Rows<T> in, out;
  const T* table;  // of position 0
  int width;
  const int32_t* positions;

  __device__ __forceinline__ void load(int row, int column, Operands& x) const {
    x.in.load(in.at(row, column));
    x.position.load(table + int64_t{positions[row]} * width + column);
  }
  __device__ __forceinline__ void store(int row, int column, Operands& x) const {
    float y[N], z[N];
    x.in.get(y);
    x.position.get(z);
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] += z[i];
    x.in.set(y);
    x.in.store(out.at(row, column));
  }
};

template <typename T, int N>
struct LogScaled {
  static constexpr int kWidth = N;
  using Operands = Vector<T, N>;
  Rows<T> x;
  float from;
  const int32_t* positions;

  __device__ __forceinline__ void load(int row, int column, Operands& y) const { y.load(x.at(row, column)); }
  __device__ __forceinline__ void store(int row, int column, Operands& y) const {
    const float length = static_cast<float>(positions[row] + 1);
    if (length <= from) return;
    const float factor = logf(length) / logf(from);
    float z[N];
    y.get(z);
#pragma unroll
    for (int i = 0; i < N; ++i) z[i] *= factor;
    y.set(z);
    y.store(x.at(row, column));
  }
};

}  // namespace

void add_positions(const Queue& queue, DType type, const DeviceStep& step, const AddPositionsArgs& args) {
  with_type(type, [&](auto element) {
    using T = decltype(element);
    const Matrix table{const_cast<void*>(args.table), args.width};
    with_vector<T>(
        [&](int n) {
          return takes_vectors<T>(table, args.width, n) && takes_vectors<T>(args.in, args.width, n) &&
                 takes_vectors<T>(args.out, args.width, n);
        },
        [&](auto n) {
          launch_each(
              queue,
              PositionsAdded<T, n()>{Rows<T>(args.in), Rows<T>(args.out),
                                     static_cast<const T*>(args.table) + args.offset * args.width, args.width, step.positions},
              step.tokens, args.width);
        });
  });
}

void log_scale(const Queue& queue, DType type, const DeviceStep& step, const LogScaleArgs& args) {
  with_type(type, [&](auto element) {
    using T = decltype(element);
    with_vector<T>([&](int n) { return takes_vectors<T>(args.x, args.width, n); },
                   [&](auto n) {
                     launch_each(queue, LogScaled<T, n()>{Rows<T>(args.x), static_cast<float>(args.from), step.positions},
                                 step.tokens, args.width);
                   });
  });
}

}  // namespace maga::cuda
