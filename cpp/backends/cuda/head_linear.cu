// For every card, type and size: tiles of 64 weight rows by 32 tokens of one head, products in fp32.
#include "backends/cuda/head_linear.h"

#include "backends/cuda/rows.cuh"

namespace maga::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = 64, kTokens = 32, kColumns = 32;  // of a tile; columns of k at a time
constexpr int kEachRows = 4, kEachTokens = 2;           // of a thread

// (grid: row tiles, heads, token tiles)
template <typename T>
__global__ void __launch_bounds__(kThreads) product(const HeadLinearArgs a, const Rows<T> in, const Rows<T> out) {
  __shared__ float weights[kColumns][kRows + 1], tokens[kColumns][kTokens + 1];
  allow_next();
  wait_for_previous();
  const int row = blockIdx.x * kRows, head = blockIdx.y, token = blockIdx.z * kTokens;
  const int in_column = head * (a.k + a.rest), out_column = head * (a.n + a.rest);
  const T* const weight = static_cast<const T*>(a.weight) + int64_t{head} * a.n * a.k;
  const int row_of_thread = threadIdx.x % 16, token_of_thread = threadIdx.x / 16;
  float sums[kEachRows][kEachTokens] = {};
  for (int column = 0; column < a.k; column += kColumns) {
    __syncthreads();
    for (int i = threadIdx.x; i < kColumns * (kRows + kTokens); i += kThreads) {
      const int c = i % kColumns, r = i / kColumns;
      const bool in_k = column + c < a.k;
      if (r < kRows) {
        weights[c][r] = in_k && row + r < a.n ? widened(weight[int64_t{row + r} * a.k + column + c]) : 0;
      } else {
        const int t = r - kRows;
        tokens[c][t] = in_k && token + t < a.tokens ? widened(*in.at(token + t, in_column + column + c)) : 0;
      }
    }
    __syncthreads();
#pragma unroll 8
    for (int c = 0; c < kColumns; ++c)
#pragma unroll
      for (int r = 0; r < kEachRows; ++r)
#pragma unroll
        for (int t = 0; t < kEachTokens; ++t)
          sums[r][t] += weights[c][row_of_thread + 16 * r] * tokens[c][token_of_thread + 16 * t];
  }
#pragma unroll
  for (int r = 0; r < kEachRows; ++r)
#pragma unroll
    for (int t = 0; t < kEachTokens; ++t) {
      const int n = row + row_of_thread + 16 * r, m = token + token_of_thread + 16 * t;
      if (n < a.n && m < a.tokens) *out.at(m, out_column + n) = narrowed<T>(sums[r][t]);
    }
  if (blockIdx.x != 0) return;
  for (int i = threadIdx.x; i < kTokens * a.rest; i += kThreads) {
    const int m = token + i / a.rest, c = i % a.rest;
    if (m < a.tokens) *out.at(m, out_column + a.n + c) = *in.at(m, in_column + a.k + c);
  }
}

}  // namespace

void head_linear(const Queue& queue, DType type, const HeadLinearArgs& args) {
  if (args.tokens == 0) return;
  const dim3 grid((args.n + kRows - 1) / kRows, args.heads, (args.tokens + kTokens - 1) / kTokens);
  with_type(type, [&](auto element) {
    using T = decltype(element);
    launch(queue, product<T>, grid, dim3(kThreads), 0, args, Rows<T>(args.in), Rows<T>(args.out));
  });
}

}  // namespace maga::cuda
