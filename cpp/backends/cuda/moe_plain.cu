// The linears of experts for every card, type and size: tiles of 64 weight rows by 32 slots, products in fp32.
#include "backends/cuda/moe_gating.cuh"
#include "backends/cuda/moe_gemm.h"
#include "backends/cuda/moe_tiles.cuh"
#include "backends/cuda/rows.cuh"

namespace maga::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = 64, kSlots = 32, kColumns = 32;  // of a tile; columns of k at a time
constexpr int kEachRows = 4, kEachSlots = 2;           // of a thread

// kHalves: 2 for a gate and its up.
template <typename T, int kHalves>
__global__ void __launch_bounds__(kThreads) plain(const MoeGemmArgs a) {
  __shared__ MoeTiles tiles;
  __shared__ float weights[kHalves][kColumns][kRows + 1], slots[kColumns][kSlots + 1];
  wait_for_previous();
  allow_next();  // only now: see moe_gemm.cuh
  const int row_tiles = (a.n + kRows - 1) / kRows;
  tiles.build(a.counts, a.experts, kSlots, row_tiles);
  __syncthreads();
  const T* const x = static_cast<const T*>(a.x);
  const int row_of_thread = threadIdx.x % 16, slot_of_thread = threadIdx.x / 16;
  MoeTile tile{};
  for (int index = blockIdx.x; index < tiles.first_tile[a.experts]; index += gridDim.x) {
    tile = tiles.at(index, tile.expert, kSlots, row_tiles);
    const int64_t first_row = int64_t{tile.expert} * kHalves * a.n;  // of the expert
    const int row = tile.row_tile * kRows;
    const T* const weight = static_cast<const T*>(a.weight) + first_row * a.k;
    float sums[kHalves][kEachRows][kEachSlots] = {};
    for (int column = 0; column < a.k; column += kColumns) {
      __syncthreads();
      for (int i = threadIdx.x; i < kColumns * (kHalves * kRows + kSlots); i += kThreads) {
        const int c = i % kColumns, r = i / kColumns;
        const bool in = column + c < a.k;
        if (r < kHalves * kRows) {
          const int half = r / kRows, n = row + r % kRows;
          weights[half][c][r % kRows] = in && n < a.n ? widened(weight[(int64_t{half} * a.n + n) * a.k + column + c]) : 0;
        } else {
          const int slot = r - kHalves * kRows;
          slots[c][slot] = in && slot < tile.slots ? widened(x[int64_t{tile.slot + slot} * a.k + column + c]) : 0;
        }
      }
      __syncthreads();
      for (int c = 0; c < kColumns; ++c)
#pragma unroll
        for (int half = 0; half < kHalves; ++half)
#pragma unroll
          for (int r = 0; r < kEachRows; ++r)
#pragma unroll
            for (int s = 0; s < kEachSlots; ++s)
              sums[half][r][s] += weights[half][c][row_of_thread + 16 * r] * slots[c][slot_of_thread + 16 * s];
    }
    const T* const bias = static_cast<const T*>(a.bias);
#pragma unroll
    for (int r = 0; r < kEachRows; ++r)
#pragma unroll
      for (int s = 0; s < kEachSlots; ++s) {
        const int n = row + row_of_thread + 16 * r, slot = slot_of_thread + 16 * s;
        if (n >= a.n || slot >= tile.slots) continue;
        float value[kHalves];
#pragma unroll
        for (int half = 0; half < kHalves; ++half)
          value[half] = sums[half][r][s] + (bias ? widened(bias[first_row + half * a.n + n]) : 0);
        if constexpr (kHalves == 2) value[0] = gated<std::is_same_v<T, float>>(a.gating, value[0], value[1]);
        static_cast<T*>(a.out)[int64_t{tile.slot + slot} * a.n + n] = narrowed<T>(value[0]);
      }
  }
}

}  // namespace

void moe_plain(const Queue& queue, DType type, int sms, const MoeGemmArgs& args) {
  with_type(type, [&](auto element) {
    using T = decltype(element);
    launch(queue, args.gated ? plain<T, 2> : plain<T, 1>, dim3(2 * sms), dim3(kThreads), 0, args);
  });
}

}  // namespace maga::cuda
