// The launch over all vectors of a matrix, for kernels whose elements do not know each other.
#pragma once

#include <algorithm>

#include "backends/cuda/rows.cuh"

namespace maga::cuda {

// A body reads one vector (load) and writes its result (store); all loads of a thread come before its first store.
// Block (threads along a row, rows), grid (rows, columns).
template <typename Body, int kUnroll>
__global__ void each_vector(const Body body, int rows, int vectors) {
  allow_next();
  const int row = blockIdx.x * blockDim.y + threadIdx.y;
  const int first = blockIdx.y * blockDim.x * kUnroll + threadIdx.x;
  wait_for_previous();
  if (row >= rows) return;
  typename Body::Operands operands[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u)
    if (const int v = first + u * blockDim.x; v < vectors) body.load(row, v * Body::kWidth, operands[u]);
#pragma unroll
  for (int u = 0; u < kUnroll; ++u)
    if (const int v = first + u * blockDim.x; v < vectors) body.store(row, v * Body::kWidth, operands[u]);
}

template <typename Body>
void launch_each(const Queue& queue, const Body& body, int rows, int width) {
  if (rows == 0 || width == 0) return;
  const int vectors = width / Body::kWidth;
  // Few elements: small CTAs, to spread over the SMs. Many: two vectors a thread, for more bytes under way.
  const bool many = int64_t{rows} * vectors > 1 << 17;
  const int unroll = many && vectors >= 64 ? 2 : 1, most_threads = many ? 512 : 128;
  const int threads = (vectors + unroll - 1) / unroll;
  const int columns = (threads + most_threads - 1) / most_threads;
  const int x = (threads + columns - 1) / columns, y = std::max(1, 128 / x);
  MAGA_CHECK(columns <= 65535, "rows of ", width, " elements");
  launch(queue, unroll == 2 ? each_vector<Body, 2> : each_vector<Body, 1>, dim3((rows + y - 1) / y, columns), dim3(x, y), 0, body,
         rows, vectors);
}

// launch_body(Constant<N>{}) with the widest vector that `fits`.
template <typename T, typename Fits, typename Launch>
void with_vector(Fits&& fits, Launch&& launch_body) {
  if (fits(kVector<T>)) {
    launch_body(Constant<kVector<T>>{});
  } else {
    launch_body(Constant<1>{});
  }
}

}  // namespace maga::cuda
