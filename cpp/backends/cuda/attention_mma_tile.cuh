// The end of a tile of attention_mma: the warps' results are added up, then those of the CTAs that share the tile.
#pragma once

#include "backends/cuda/attention_mma_few.cuh"
#include "backends/cuda/attention_mma_rows.cuh"

namespace maga::cuda {

// Where a tile's results go: to `out`, or, of a tile that other CTAs share, to this CTA's partial results.
template <typename S>
struct MmaTile {
  using T = typename S::T;
  const MmaArgs& args;
  const MmaCursor<S>& at;
  int rows;     // of the tile that exist
  int owner;    // the CTA in which the tile begins
  int ctas;     // that share the tile
  int partial;  // this CTA's place in the partial results

  __device__ MmaTile(const MmaArgs& args, const MmaCursor<S>& at, int position, int share) : args(args), at(at) {
    rows = min(S::kRows, at.sequence.tokens * args.shape.group - at.place.tile * S::kRows);
    const int begin = position - (at.place.block - at.first_block), end = begin + at.end_block - at.first_block;
    owner = begin / share;
    ctas = (end - 1) / share - owner + 1;
    partial = slot_of(blockIdx.x - owner);
  }
  // A CTA has at most one tile that came from the CTA before and one that goes on in the next.
  __device__ int slot_of(int i) const { return i == 0 ? 2 * owner + 1 : 2 * (owner + i); }
  // Where a row goes, and what its values are multiplied with.
  struct Row {
    float* partial = nullptr;
    T* out = nullptr;
    float scale = 1;
  };
  // `sums`: maximum and sum of the row, over all its keys.
  __device__ Row final_row(int row, float2 sums) const {
    const int packed = at.place.tile * S::kRows + row, token = packed / args.shape.group;
    const int head = at.place.head * args.shape.group + packed - token * args.shape.group;
    Row to{.out = static_cast<T*>(args.out) + (at.sequence.first_token + token) * args.out_stride + head * S::kHeadDim};
    if (args.sinks != nullptr) {
      const float sink = sink_of(head) * kLog2e, most = fmaxf(sums.x, sink);
      to.scale = exp2_fast(sums.x - most);
      sums.y = sums.y * to.scale + exp2_fast(sink - most);
    }
    to.scale = sums.y > 0 ? to.scale / sums.y : 0;
    return to;
  }
  __device__ Row row_of(int row, float2 sums) const {
    if (row >= rows) return {};
    if (ctas == 1) return final_row(row, sums);
    return {.partial = args.partial_out + (static_cast<int64_t>(partial) * S::kRows + row) * S::kHeadDim};
  }
  template <int kCount>
  __device__ void store(const Row& row, int column, const float (&value)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      if (row.partial != nullptr)
        __stcg(reinterpret_cast<float2*>(row.partial + column + i), make_float2(value[i], value[i + 1]));
      else if (row.out != nullptr)
        *reinterpret_cast<uint32_t*>(row.out + column + i) = pack(value[i] * row.scale, value[i + 1] * row.scale);
    }
  }
  __device__ void store_sums(int row, float2 sums) const {
    if (row < rows && ctas > 1) __stcg(args.partial_sums + static_cast<int64_t>(partial) * S::kRows + row, sums);
  }

  // The last CTA to arrive adds up what all of them have left, in the order of their keys.
  __device__ void merge() const {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      last = atomicAdd(args.arrived + owner, 1) == ctas - 1;
      if (last) args.arrived[owner] = 0;
      __threadfence();
    }
    __syncthreads();
    if (!last) return;
    if (ctas == 2)
      add_up<2>();
    else
      add_up<S::kHeadDim <= 192 ? 8 : 4>();
  }

 private:
  // Of codes, `out` and sinks have the type that the arguments say, whatever is multiplied.
  __device__ uint32_t pack(float a, float b) const {
    if (S::kCodes && args.bf16) return Tensor<__nv_bfloat16>::pack(a, b);
    return Tensor<T>::pack(a, b);
  }
  __device__ float sink_of(int head) const {
    if (S::kCodes && args.bf16) return __bfloat162float(static_cast<const __nv_bfloat16*>(args.sinks)[head]);
    return Tensor<T>::to_float(static_cast<const T*>(args.sinks)[head]);
  }

  // kAtOnce parts of a result are read together.
  template <int kAtOnce>
  __device__ void add_up() const {
#pragma unroll(8 / kAtOnce)
    for (int i = threadIdx.x; i < rows * S::kHeadDim / 4; i += S::kThreads) {
      const int row = i / (S::kHeadDim / 4), column = i % (S::kHeadDim / 4) * 4;
      float maximum = -INFINITY, sum = 0, value[4] = {};
      for (int first = 0; first < ctas; first += kAtOnce) {
        float2 sums[kAtOnce];
        float4 part[kAtOnce];
        float most = maximum;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const int64_t from = static_cast<int64_t>(slot_of(min(first + j, ctas - 1))) * S::kRows + row;
          sums[j] = __ldcg(args.partial_sums + from);
          part[j] = __ldcg(reinterpret_cast<const float4*>(args.partial_out + from * S::kHeadDim + column));
          if (first + j >= ctas) sums[j] = {-INFINITY, 0};
          most = fmaxf(most, sums[j].x);
        }
        const float base = most == -INFINITY ? 0 : most;  // no key seen
        const float shrink = exp2_fast(maximum - base);
#pragma unroll
        for (int c = 0; c < 4; ++c) value[c] *= shrink;
        sum *= shrink, maximum = most;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const float factor = exp2_fast(sums[j].x - base);
          value[0] += part[j].x * factor, value[1] += part[j].y * factor;
          value[2] += part[j].z * factor, value[3] += part[j].w * factor;
          sum += sums[j].y * factor;
        }
      }
      store(final_row(row, {maximum, sum}), column, value);
    }
  }
};

template <typename S>
__device__ void finish_tile(MmaRows<S>& rows, const MmaTile<S>& tile, int row_warp, int, unsigned char*) {
  const int lane = threadIdx.x % 32;
  if constexpr (S::kCodes) rows.rescale({rows.unit(), rows.unit()});
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows.sum[r] += __shfl_xor_sync(~0u, rows.sum[r], 1);
    rows.sum[r] += __shfl_xor_sync(~0u, rows.sum[r], 2);
    const int row = row_warp * 16 + lane / 4 + r * 8;
    const float2 sums = {rows.maximum[r], rows.sum[r]};
    if (lane % 4 == 0) tile.store_sums(row, sums);
    const auto to = tile.row_of(row, sums);
#pragma unroll
    for (int i = 0; i < S::kHeadDim / 8; ++i) {
      const float2 x = rows.pair(i, r);
      tile.store(to, rows.column(i), {x.x, x.y});
    }
  }
  __syncthreads();
}

template <typename S>
__device__ void finish_tile(MmaFew<S>& few, const MmaTile<S>& tile, int, int key_warp, unsigned char* scratch) {
  constexpr int kTiles = MmaFew<S>::kTiles;
  const int lane = threadIdx.x % 32;
  float* total = reinterpret_cast<float*>(scratch);                         // (16, kScratchPitch)
  float2* sums = reinterpret_cast<float2*>(total + 16 * S::kScratchPitch);  // (kKeyWarps + 1, rows), the last of all warps
  // `work` of each of this thread's rows: its tile, its place there, itself
  const auto each_row = [&](auto&& work) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) work(n, c, few.row(n, c));
  };
  each_row([&](int n, int c, int row) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) few.sum[n][c] += __shfl_xor_sync(~0u, few.sum[n][c], step);
    if (lane < 4) sums[key_warp * S::kRows + row] = {few.maximum[n][c], few.sum[n][c]};
  });
  __syncthreads();
  float factor[kTiles][2];
  each_row([&](int n, int c, int row) {
    float2 all = {-INFINITY, 0};
#pragma unroll
    for (int w = 0; w < S::kKeyWarps; ++w) all.x = fmaxf(all.x, sums[w * S::kRows + row].x);
    const float base = all.x == -INFINITY ? 0 : all.x;
#pragma unroll
    for (int w = 0; w < S::kKeyWarps; ++w) all.y += sums[w * S::kRows + row].y * exp2_fast(sums[w * S::kRows + row].x - base);
    factor[n][c] = exp2_fast(few.maximum[n][c] - base) * few.unit();
    if (key_warp == 0 && lane < 4) sums[S::kKeyWarps * S::kRows + row] = all;
  });
  few.rescale(factor);
  // With few rows there is room for several sums of the warps' results, which take turns otherwise.
  static_assert(S::kKeyWarps == 4);
  const int area_rows = tile.rows <= 4 ? 4 : tile.rows <= 8 ? 8 : 16, areas = 16 / area_rows;
  for (int turn = 0; turn * areas < S::kKeyWarps; ++turn) {
    if (key_warp / areas == turn)
      each_row([&](int n, int c, int row) {
        if (row >= area_rows) return;
        float* const to = total + (key_warp % areas * area_rows + row) * S::kScratchPitch;
#pragma unroll
        for (int i = 0; i < S::kHeadDim / 16; ++i)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float& sum = to[few.column(i, h)];
            sum = (turn == 0 ? 0 : sum) + few.out[i][n][2 * h + c];
          }
      });
    __syncthreads();
  }
  if (threadIdx.x < S::kRows) tile.store_sums(threadIdx.x, sums[S::kKeyWarps * S::kRows + threadIdx.x]);
  for (int i = threadIdx.x; i < tile.rows * S::kHeadDim / 4; i += S::kThreads) {
    const int row = i / (S::kHeadDim / 4), column = i % (S::kHeadDim / 4) * 4;
    float4 x = {0, 0, 0, 0};
    for (int area = 0; area < areas; ++area) {
      const float4 y = *reinterpret_cast<const float4*>(total + (area * area_rows + row) * S::kScratchPitch + column);
      x = {x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w};
    }
    tile.store(tile.row_of(row, sums[S::kKeyWarps * S::kRows + row]), column, {x.x, x.y, x.z, x.w});
  }
  __syncthreads();
}

}  // namespace maga::cuda
