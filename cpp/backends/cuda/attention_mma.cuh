// The kernel behind attention_mma.h; each attention_mma_hd*.cu compiles it for one head size.
//
// A CTA walks its share of the work list (attention_work.cuh). The warps stand in kRowWarps x kKeyWarps: a row warp has 16 packed
// query rows, a key warp has kSlice keys of every block. Warps with the same keys (a team) fill a ring of stages in shared memory,
// which runs ahead over the ends of tiles. With one row warp a team is a single warp, and the main loop has no CTA barrier.
#pragma once

#include "backends/cuda/attention_mma.h"
#include "backends/cuda/attention_tensor.cuh"
#include "backends/cuda/launch.cuh"

namespace maga::cuda {

constexpr float kLog2e = 1.4426950408889634f;

template <typename T_, int kHeadDim_, int kRowWarps_, int kKeyWarps_, int kSlice_>
struct MmaShape {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_, kRowWarps = kRowWarps_, kKeyWarps = kKeyWarps_, kSlice = kSlice_;
  static_assert(kRowWarps == 1 || kKeyWarps == 1);
  static constexpr int kRows = 16 * kRowWarps;
  static constexpr int kBlock = kSlice * kKeyWarps;
  static constexpr int kTeam = 32 * kRowWarps;  // threads
  static constexpr int kThreads = kTeam * kKeyWarps;
  static constexpr int kPitch = kHeadDim + 8;  // an odd number of 16-byte pieces: ldmatrix meets no bank twice
  static constexpr int kTeamStage = 2 * kSlice * kPitch * sizeof(T);  // keys, then values
  static constexpr int kStage = kTeamStage * kKeyWarps;
  static constexpr int kGroups = kSlice / 16;  // runs of 16 keys, which lie in one page
  // Where key warps add up their results: rows, then maximum and sum of each warp's rows.
  static constexpr int kScratchPitch = kHeadDim + 8;
  static constexpr int kScratch = kKeyWarps > 1 ? 16 * kScratchPitch * 4 + (kKeyWarps + 1) * 16 * 8 : 0;
  static constexpr int kCtas = kHeadDim <= 128 ? 2 : 1;  // an SM, at least
};

// A place in the work list, with what is needed to read its keys.
template <typename S>
struct MmaCursor {
  WorkPlace place;
  WorkSequence sequence;
  TileKeys keys;
  int first_block = 0, end_block = 0;  // of the tile

  __device__ void enter_tile(const MmaArgs& args) {
    keys = tile_keys(sequence, args.shape, place.tile, S::kRows);
    first_block = keys.low / S::kBlock, end_block = divide_up(keys.high, S::kBlock);
  }
  __device__ void start(const MmaArgs& args, const WorkStart& at) {
    place = at.place, sequence = at.sequence;
    enter_tile(args);
  }
  // To the block after this one, which must exist.
  __device__ void advance(const MmaArgs& args) {
    if (++place.block < end_block) return;
    if (++place.tile == tiles_of(sequence, args.shape.group, S::kRows)) {
      place.tile = 0;
      if (++place.head == args.shape.kv_heads) {
        place.head = 0;
        sequence = args.work.sequences[++place.sequence];
      }
    }
    enter_tile(args);
    place.block = first_block;
  }
};

// Copies one team's keys and values, block after block, to its ring.
template <typename S>
struct MmaLoader {
  using T = typename S::T;
  MmaCursor<S> at;
  int page = 0;         // lane l: the page of the team's l-th run of 16 keys from `page_block` on
  int page_block = -1;  // -1: not read

  __device__ void read_pages(const MmaArgs& args, int key_warp) {
    const int lane = threadIdx.x % 32;
    page_block = at.place.block;
    const int key = (page_block + lane / S::kGroups) * S::kBlock + key_warp * S::kSlice + lane % S::kGroups * 16;
    page = args.pages[at.sequence.page_start + (min(key, at.sequence.kv_length - 1) >> args.page_shift)];
  }
  __device__ void load(const MmaArgs& args, int key_warp, uint32_t stage) {
    constexpr int kPieces = S::kHeadDim / 8;  // 16-byte pieces of a row
    constexpr int kLoads = S::kSlice * kPieces / S::kTeam;
    static_assert(kLoads * S::kTeam == S::kSlice * kPieces);
    constexpr int kUnroll = kLoads < 8 ? kLoads : 8;  // more would cost registers that the largest head size does not have
    if (page_block < 0 || at.place.block - page_block >= 32 / S::kGroups) read_pages(args, key_warp);
    const int run = (at.place.block - page_block) * S::kGroups;
    const int first_key = at.place.block * S::kBlock + key_warp * S::kSlice;
    const int in_page = (1 << args.page_shift) - 1;
    const int64_t head = at.place.head * args.head_stride;
    const T* k = static_cast<const T*>(args.k) + head;
    const T* v = static_cast<const T*>(args.v) + head;
#pragma unroll kUnroll
    for (int i = 0; i < kLoads; ++i) {
      const int piece = threadIdx.x % S::kTeam + i * S::kTeam;
      const int row = piece / kPieces, column = piece % kPieces * 8, key = first_key + row;
      const int id = __shfl_sync(~0u, page, run + row / 16);
      const int64_t from = id * args.page_stride + (key & in_page) * S::kHeadDim + column;
      const uint32_t to = stage + (row * S::kPitch + column) * sizeof(T);
      const bool wanted = key < at.sequence.kv_length;
      copy_async(to, k + from, wanted);
      copy_async(to + S::kTeamStage / 2, v + from, wanted);
    }
  }
  __device__ void advance(const MmaArgs& args) {
    at.advance(args);
    if (at.place.block == at.first_block) page_block = -1;
  }
};

// What a warp knows of its 16 rows: a thread has rows lane / 4 and lane / 4 + 8, and of every 8 columns 2 * (lane % 4) and the
// next.
template <typename S>
struct MmaRows {
  using T = typename S::T;
  uint32_t q[S::kHeadDim / 16][4];
  float out[S::kHeadDim / 8][4];
  float maximum[2], sum[2];  // of scores in units of log 2; the sum of this thread's columns only
  int limit[2], head[2];     // keys below the limit are seen; query heads

  __device__ void start(const MmaArgs& args, const MmaCursor<S>& at, int row_warp) {
    const int lane = threadIdx.x % 32, last = at.sequence.tokens * args.shape.group - 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int packed = min(at.place.tile * S::kRows + row_warp * 16 + lane / 4 + r * 8, last);
      const int token = packed / args.shape.group;
      head[r] = at.place.head * args.shape.group + packed % args.shape.group;
      limit[r] = at.sequence.kv_length - at.sequence.tokens + token + 1;
      maximum[r] = -INFINITY, sum[r] = 0;
      const T* row = static_cast<const T*>(args.q) + (at.sequence.first_token + token) * args.q_stride + head[r] * S::kHeadDim;
#pragma unroll
      for (int i = 0; i < S::kHeadDim / 8; ++i)
        q[i / 2][i % 2 * 2 + r] = *reinterpret_cast<const uint32_t*>(row + i * 8 + lane % 4 * 2);
    }
#pragma unroll
    for (int i = 0; i < S::kHeadDim / 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) out[i][j] = 0;
  }

  // One slice of keys and values at `stage`, the first key being `first_key`.
  __device__ void step(const MmaArgs& args, const MmaCursor<S>& at, uint32_t stage, int first_key) {
    const int lane = threadIdx.x % 32;
    float score[S::kSlice / 8][4] = {};
    const uint32_t k = stage + (((lane & 7) + (lane >> 4) * 8) * S::kPitch + (lane >> 3 & 1) * 8) * sizeof(T);
#pragma unroll
    for (int i = 0; i < S::kHeadDim / 16; ++i) {
#pragma unroll
      for (int j = 0; j < S::kSlice / 16; ++j) {
        uint32_t b[4];
        load_matrices(b, k + (j * 16 * S::kPitch + i * 16) * sizeof(T));
        Tensor<T>::mma(score[2 * j], q[i], b[0], b[1]);
        Tensor<T>::mma(score[2 * j + 1], q[i], b[2], b[3]);
      }
    }

    const int key = first_key + lane % 4 * 2;
    const float scale = args.scale * kLog2e;
#pragma unroll
    for (int j = 0; j < S::kSlice / 8; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) score[j][c] *= scale;
    if (args.soft_cap > 0) {
      const float cap = args.soft_cap * kLog2e, inverse = 1 / cap;
#pragma unroll
      for (int j = 0; j < S::kSlice / 8; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) score[j][c] = cap * tanh_fast(score[j][c] * inverse);
    }
    if (args.alibi_slopes != nullptr) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float slope = args.alibi_slopes[head[r]] * kLog2e;
#pragma unroll
        for (int j = 0; j < S::kSlice / 8; ++j)
#pragma unroll
          for (int c = 0; c < 2; ++c) score[j][2 * r + c] += slope * (key + j * 8 + c - (limit[r] - 1));
      }
    }
    if (first_key + S::kSlice > at.keys.first_limit || (args.shape.window > 0 && first_key < at.keys.high - args.shape.window)) {
      const bool tree = args.tree_mask != nullptr && at.sequence.tokens <= kTreeTokens;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int low = args.shape.window > 0 ? limit[r] - args.shape.window : 0, high = tree ? at.sequence.kv_length : limit[r];
#pragma unroll
        for (int j = 0; j < S::kSlice / 8; ++j)
#pragma unroll
          for (int c = 0; c < 2; ++c)
            if (key + j * 8 + c < low || key + j * 8 + c >= high) score[j][2 * r + c] = -INFINITY;
        if (tree) {
          const int before = at.sequence.kv_length - at.sequence.tokens;
          const uint64_t mask = args.tree_mask[at.sequence.first_token + limit[r] - 1 - before];
#pragma unroll
          for (int j = 0; j < S::kSlice / 8; ++j)
#pragma unroll
            for (int c = 0; c < 2; ++c)
              if (const int i = key + j * 8 + c - before; i >= 0 && (mask >> i & 1) == 0) score[j][2 * r + c] = -INFINITY;
        }
      }
    }

    float shrink[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = maximum[r];
#pragma unroll
      for (int j = 0; j < S::kSlice / 8; ++j) most = fmaxf(most, fmaxf(score[j][2 * r], score[j][2 * r + 1]));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      const float base = most == -INFINITY ? 0 : most;  // no key seen yet
      shrink[r] = exp2_fast(maximum[r] - base);
      maximum[r] = most;
      float more = 0;
#pragma unroll
      for (int j = 0; j < S::kSlice / 8; ++j)
#pragma unroll
        for (int c = 2 * r; c < 2 * r + 2; ++c) more += score[j][c] = exp2_fast(score[j][c] - base);
      sum[r] = sum[r] * shrink[r] + more;
    }
    if (__any_sync(~0u, shrink[0] != 1.f || shrink[1] != 1.f)) rescale(shrink);

    const uint32_t v = stage + S::kTeamStage / 2 + ((lane & 15) * S::kPitch + (lane >> 4) * 8) * sizeof(T);
#pragma unroll
    for (int j = 0; j < S::kSlice / 16; ++j) {
      const uint32_t p[4] = {Tensor<T>::pack(score[2 * j][0], score[2 * j][1]), Tensor<T>::pack(score[2 * j][2], score[2 * j][3]),
                             Tensor<T>::pack(score[2 * j + 1][0], score[2 * j + 1][1]),
                             Tensor<T>::pack(score[2 * j + 1][2], score[2 * j + 1][3])};
#pragma unroll
      for (int i = 0; i < S::kHeadDim / 16; ++i) {
        uint32_t b[4];
        load_matrices_transposed(b, v + (j * 16 * S::kPitch + i * 16) * sizeof(T));
        Tensor<T>::mma(out[2 * i], p, b[0], b[1]);
        Tensor<T>::mma(out[2 * i + 1], p, b[2], b[3]);
      }
    }
  }

  __device__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < S::kHeadDim / 8; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) out[i][c] *= factor[c / 2];
  }
};

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
      const float sink = Tensor<T>::to_float(static_cast<const T*>(args.sinks)[head]) * kLog2e, most = fmaxf(sums.x, sink);
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
  static __device__ void store(const Row& row, int column, const float (&value)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      if (row.partial != nullptr)
        __stcg(reinterpret_cast<float2*>(row.partial + column + i), make_float2(value[i], value[i + 1]));
      else if (row.out != nullptr)
        *reinterpret_cast<uint32_t*>(row.out + column + i) = Tensor<T>::pack(value[i] * row.scale, value[i + 1] * row.scale);
    }
  }
  __device__ void store_sums(int row, float2 sums) const {
    if (row < rows && ctas > 1) __stcg(args.partial_sums + static_cast<int64_t>(partial) * S::kRows + row, sums);
  }

  // The last CTA to arrive adds up what all of them have left, in the order of their keys.
  __device__ void merge() const {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(args.arrived + owner, 1) == ctas - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    if (threadIdx.x == 0) args.arrived[owner] = 0;
    if (ctas == 2)
      add_up<2>();
    else
      add_up<8>();
  }

 private:
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
__device__ void finish_tile(MmaRows<S>& rows, const MmaTile<S>& tile, int row_warp, int key_warp, unsigned char* scratch) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows.sum[r] += __shfl_xor_sync(~0u, rows.sum[r], 1);
    rows.sum[r] += __shfl_xor_sync(~0u, rows.sum[r], 2);
  }
  if constexpr (S::kKeyWarps == 1) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_warp * 16 + lane / 4 + r * 8;
      const float2 sums = {rows.maximum[r], rows.sum[r]};
      if (lane % 4 == 0) tile.store_sums(row, sums);
      const auto to = tile.row_of(row, sums);
#pragma unroll
      for (int i = 0; i < S::kHeadDim / 8; ++i) tile.store(to, i * 8 + lane % 4 * 2, {rows.out[i][2 * r], rows.out[i][2 * r + 1]});
    }
  } else {
    float* total = reinterpret_cast<float*>(scratch);                         // (16, kScratchPitch)
    float2* sums = reinterpret_cast<float2*>(total + 16 * S::kScratchPitch);  // (kKeyWarps + 1, 16), the last of all warps
    if (lane % 4 == 0)
#pragma unroll
      for (int r = 0; r < 2; ++r) sums[key_warp * 16 + lane / 4 + r * 8] = {rows.maximum[r], rows.sum[r]};
    __syncthreads();
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = lane / 4 + r * 8;
      float2 all = {-INFINITY, 0};
#pragma unroll
      for (int w = 0; w < S::kKeyWarps; ++w) all.x = fmaxf(all.x, sums[w * 16 + row].x);
      const float base = all.x == -INFINITY ? 0 : all.x;
#pragma unroll
      for (int w = 0; w < S::kKeyWarps; ++w) all.y += sums[w * 16 + row].y * exp2_fast(sums[w * 16 + row].x - base);
      factor[r] = exp2_fast(rows.maximum[r] - base);
      if (key_warp == 0 && lane % 4 == 0) sums[S::kKeyWarps * 16 + row] = all;
    }
    rows.rescale(factor);
    // With few rows there is room for several sums of the warps' results, which take turns otherwise.
    static_assert(S::kKeyWarps == 4);
    const int area_rows = tile.rows <= 4 ? 4 : tile.rows <= 8 ? 8 : 16, areas = 16 / area_rows;
    for (int turn = 0; turn * areas < S::kKeyWarps; ++turn) {
      if (key_warp / areas == turn) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = lane / 4 + r * 8;
          if (row >= area_rows) continue;
          float* to = total + (key_warp % areas * area_rows + row) * S::kScratchPitch + lane % 4 * 2;
#pragma unroll
          for (int i = 0; i < S::kHeadDim / 8; ++i) {
            float2& sum = *reinterpret_cast<float2*>(to + i * 8);
            const float2 old = turn == 0 ? make_float2(0, 0) : sum;
            sum = {old.x + rows.out[i][2 * r], old.y + rows.out[i][2 * r + 1]};
          }
        }
      }
      __syncthreads();
    }
    if (threadIdx.x < 16) tile.store_sums(threadIdx.x, sums[S::kKeyWarps * 16 + threadIdx.x]);
    for (int i = threadIdx.x; i < tile.rows * S::kHeadDim / 4; i += S::kThreads) {
      const int row = i / (S::kHeadDim / 4), column = i % (S::kHeadDim / 4) * 4;
      float4 x = {0, 0, 0, 0};
      for (int area = 0; area < areas; ++area) {
        const float4 y = *reinterpret_cast<const float4*>(total + (area * area_rows + row) * S::kScratchPitch + column);
        x = {x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w};
      }
      tile.store(tile.row_of(row, sums[S::kKeyWarps * 16 + row]), column, {x.x, x.y, x.z, x.w});
    }
  }
  if (tile.ctas > 1) tile.merge();
  __syncthreads();
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kCtas) attention_mma_kernel(const __grid_constant__ MmaArgs args) {
#if __CUDA_ARCH__ >= 800
  using T = typename S::T;
  extern __shared__ __align__(16) unsigned char shared[];
  allow_next();
  wait_for_previous();
  const WorkStart start = args.work.starts[blockIdx.x];
  if (args.zero_to > 0) {
    for (int row = *args.token_count + blockIdx.x; row < args.zero_to; row += gridDim.x)
      for (int i = threadIdx.x; i < args.shape.group * args.shape.kv_heads * S::kHeadDim / 2; i += S::kThreads)
        reinterpret_cast<uint32_t*>(static_cast<T*>(args.out) + row * args.out_stride)[i] = 0;
  }
  if (start.blocks == 0) return;
  const int begin = blockIdx.x * start.share, end = begin + start.blocks;

  const int warp = threadIdx.x / 32, row_warp = warp % S::kRowWarps, key_warp = warp / S::kRowWarps;
  unsigned char* scratch = shared + args.stages * S::kStage;
  const uint32_t ring = shared_address(shared) + key_warp * S::kTeamStage;
  auto team_barrier = [] {
    if constexpr (S::kRowWarps == 1)
      __syncwarp();
    else
      __syncthreads();
  };

  MmaLoader<S> loader;
  loader.at.start(args, start);
  MmaCursor<S> at = loader.at;
  int loaded = begin, load_stage = 0;
  auto load_next = [&] {
    if (loaded < end) {
      if (loaded > begin) loader.advance(args);
      loader.load(args, key_warp, ring + load_stage * S::kStage);
      ++loaded;
      if (++load_stage == args.stages) load_stage = 0;
    }
    copy_commit();  // of nothing at the end, so that the count of groups tells the stage
  };
  for (int i = 0; i < args.stages - 1; ++i) load_next();

  MmaRows<S> rows;
  rows.start(args, at, row_warp);
  int stage = 0;
  for (int position = begin;; ++position) {
    if (args.stages == 2)
      copy_wait<0>();
    else if (args.stages == 3)
      copy_wait<1>();
    else
      copy_wait<2>();
    team_barrier();
    load_next();
    rows.step(args, at, ring + stage * S::kStage, at.place.block * S::kBlock + key_warp * S::kSlice);
    if (++stage == args.stages) stage = 0;
    const bool done = position + 1 == end;
    if (done || at.place.block + 1 == at.end_block) {
      finish_tile(rows, MmaTile<S>(args, at, position, start.share), row_warp, key_warp, scratch);
      if (done) return;
      at.advance(args);
      rows.start(args, at, row_warp);
    } else {
      ++at.place.block;
    }
  }
#endif
}

template <typename S>
MmaKernel mma_kernel() {
  return {attention_mma_kernel<S>, S::kRows, S::kBlock, S::kThreads, S::kStage, S::kScratch};
}

template <int kHeadDim>
MmaKernels mma_kernels(DType type) {
  constexpr int kSlice = kHeadDim <= 128 ? 64 : 32;
  if (type == DType::f16)
    return {mma_kernel<MmaShape<__half, kHeadDim, 1, 4, 16>>(), mma_kernel<MmaShape<__half, kHeadDim, 4, 1, kSlice>>()};
  return {mma_kernel<MmaShape<__nv_bfloat16, kHeadDim, 1, 4, 16>>(), mma_kernel<MmaShape<__nv_bfloat16, kHeadDim, 4, 1, kSlice>>()};
}

}  // namespace maga::cuda
