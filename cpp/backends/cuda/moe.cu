#include "backends/cuda/moe.h"

#include <algorithm>

#include "backends/cuda/rows.cuh"

namespace maga::cuda {
namespace {

constexpr int kThreads = 256;

// --- place ---

struct PlaceArgs {
  MoeTables tables;
  const char* x;
  int64_t x_stride;  // bytes
  char* sorted;      // (slots, bytes)
  int bytes;         // of a row
  int top_k;
};

// A CTA a row. Word: what rows are copied in.
template <typename Word>
__global__ void __launch_bounds__(kThreads) place(const PlaceArgs a) {
  allow_next();
  wait_for_previous();
  __shared__ int slots[kMostChosen];
  const int64_t row = blockIdx.x;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = warp; i < a.top_k; i += kThreads / 32) {
    const int expert = a.tables.chosen[row * a.top_k + i];
    int before = 0;  // slots of the experts before it
    for (int e = lane; e < expert; e += 32) before += a.tables.counts[e];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) before += __shfl_xor_sync(~0u, before, step);
    if (lane == 0) {
      slots[i] = expert < 0 ? -1 : before + atomicAdd(a.tables.placed + expert, 1);
      a.tables.slots[row * a.top_k + i] = slots[i];
    }
  }
  __syncthreads();
  if (slots[0] < 0) return;
  const int words = a.bytes / static_cast<int>(sizeof(Word));
  const Word* const from = reinterpret_cast<const Word*>(a.x + row * a.x_stride);
  for (int w = threadIdx.x; w < words; w += kThreads) {
    const Word word = from[w];
    for (int i = 0; i < a.top_k; ++i) reinterpret_cast<Word*>(a.sorted + int64_t{slots[i]} * a.bytes)[w] = word;
  }
}

// --- combine ---

template <typename T>
struct CombineArgs {
  MoeTables tables;
  Rows<T> residual, out;
  const T* results;  // (slots, width)
  int rows, width, top_k, experts;
};

// Grid (rows, columns). The tables are made ready for the next op.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads) combine(const CombineArgs<T> a) {
  allow_next();
  wait_for_previous();
  const int64_t row = blockIdx.x;
  if (row == 0 && blockIdx.y == 0)
    for (int e = threadIdx.x; e < a.experts; e += kThreads) a.tables.counts[e] = a.tables.placed[e] = 0;
  const int column = (blockIdx.y * kThreads + threadIdx.x) * N;
  if (column >= a.width) return;
  Vector<T, N> part;
  float sum[N] = {}, x[N];
  for (int i = 0; i < a.top_k; ++i) {
    const int slot = a.tables.slots[row * a.top_k + i];
    if (slot < 0) break;
    const float weight = a.tables.weights[row * a.top_k + i];
    part.load(a.results + int64_t{slot} * a.width + column);
    part.get(x);
#pragma unroll
    for (int n = 0; n < N; ++n) sum[n] += weight * x[n];
  }
  if (a.residual.data) {
    part.load(a.residual.at(row, column));
    part.get(x);
#pragma unroll
    for (int n = 0; n < N; ++n) sum[n] += x[n];
  }
  part.set(sum);
  part.store(a.out.at(row, column));
}

template <typename T, int N>
void launch_combine(const Queue& queue, const CombineArgs<T>& args) {
  const int columns = (args.width / N + kThreads - 1) / kThreads;
  launch(queue, combine<T, N>, dim3(args.rows, columns), dim3(kThreads), 0, args);
}

// --- memory ---

constexpr int64_t kAlignment = 256;

// Hands out parts of a block of memory, or counts what they would need.
struct Parts {
  std::byte* data = nullptr;
  int64_t used = 0;

  template <typename T>
  T* next(int64_t count) {
    T* const part = reinterpret_cast<T*>(data + used);
    used += (count * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    return part;
  }
};

struct Buffers {
  MoeTables tables;
  std::byte* sorted;  // (slots, in), and then (slots, out)
  std::byte* hidden;  // (slots, width)

  Buffers(Parts& parts, const Moe& op, int64_t rows, DType type) {
    const int64_t slots = rows * op.routing.top_k, size = size_of(type);
    tables.chosen = parts.next<int32_t>(slots);
    tables.weights = parts.next<float>(slots);
    tables.slots = parts.next<int32_t>(slots);
    sorted = parts.next<std::byte>(slots * std::max(op.in.width, op.out.width) * size);
    hidden = parts.next<std::byte>(slots * op.width * size);
  }
};

}  // namespace

void moe_place(const Queue& queue, DType type, const MoeArgs& args, const MoeTables& tables, void* sorted) {
  const int64_t size = size_of(type), width = args.op->in.width;
  const PlaceArgs place_args{.tables = tables,
                             .x = static_cast<const char*>(args.x.data),
                             .x_stride = args.x.stride * size,
                             .sorted = static_cast<char*>(sorted),
                             .bytes = static_cast<int>(width * size),
                             .top_k = static_cast<int>(args.op->routing.top_k)};
  const auto fits = [&](int64_t bytes) {
    return reinterpret_cast<uintptr_t>(args.x.data) % bytes == 0 && place_args.x_stride % bytes == 0 &&
           place_args.bytes % bytes == 0;
  };
  launch(queue,
         fits(16)  ? place<uint4>
         : fits(4) ? place<uint32_t>
                   : place<uint16_t>,
         dim3(args.rows), dim3(kThreads), 0, place_args);
}

void moe_combine(const Queue& queue, DType type, const MoeArgs& args, const MoeTables& tables, const void* slots) {
  with_type(type, [&](auto element) {
    using T = decltype(element);
    const CombineArgs<T> combine_args{.tables = tables,
                                      .residual = Rows<T>(args.residual),
                                      .out = Rows<T>(args.out),
                                      .results = static_cast<const T*>(slots),
                                      .rows = args.rows,
                                      .width = static_cast<int>(args.op->out.width),
                                      .top_k = static_cast<int>(args.op->routing.top_k),
                                      .experts = static_cast<int>(args.op->routing.experts)};
    const int width = combine_args.width;
    if (takes_vectors<T>(args.residual, width, kVector<T>) && takes_vectors<T>(args.out, width, kVector<T>))
      launch_combine<T, kVector<T>>(queue, combine_args);
    else
      launch_combine<T, 1>(queue, combine_args);
  });
}

Experts::Experts(const std::vector<const Moe*>& ops, int64_t rows, DType type, cudaStream_t stream) : type_(type), gemm_(type) {
  int64_t bytes = 0, experts = 0;
  for (const Moe* op : ops) {
    Parts parts;
    Buffers(parts, *op, rows, type);
    bytes = std::max(bytes, parts.used);
    experts = std::max(experts, op->routing.experts);
  }
  memory_ = DeviceMemory(bytes, "experts");
  counts_ = DeviceMemory(2 * experts * static_cast<int64_t>(sizeof(int32_t)), "experts");
  MAGA_CUDA(cudaMemsetAsync(counts_.data(), 0, static_cast<size_t>(counts_.bytes()), stream));
}

void Experts::run(const Queue& queue, const MoeArgs& args) {
  const Moe& op = *args.op;
  Parts parts{.data = memory_.data()};
  Buffers buffers(parts, op, args.rows, type_);
  MAGA_CHECK(parts.used <= memory_.bytes(), args.rows, " rows of experts");
  buffers.tables.counts = counts_.as<int32_t>();
  buffers.tables.placed = buffers.tables.counts + op.routing.experts;
  moe_route(queue, args, buffers.tables);
  moe_place(queue, type_, args, buffers.tables, buffers.sorted);
  MoeGemmArgs gemm{.counts = buffers.tables.counts,
                   .experts = static_cast<int>(op.routing.experts),
                   .top_k = static_cast<int>(op.routing.top_k),
                   .tokens = args.rows,
                   .x = buffers.sorted,
                   .out = buffers.hidden,
                   .weight = args.gate_up,
                   .layout = args.gate_up_layout,
                   .bias = args.gate_up_bias,
                   .n = static_cast<int>(op.width),
                   .k = static_cast<int>(op.in.width),
                   .gated = true,
                   .gating = op.gating};
  gemm_.run(queue, gemm);
  gemm.x = buffers.hidden;
  gemm.out = buffers.sorted;
  gemm.weight = args.down;
  gemm.layout = args.down_layout;
  gemm.bias = args.down_bias;
  gemm.n = static_cast<int>(op.out.width);
  gemm.k = static_cast<int>(op.width);
  gemm.gated = false;
  gemm_.run(queue, gemm);
  moe_combine(queue, type_, args, buffers.tables, buffers.sorted);
}

}  // namespace maga::cuda
