// The kernel behind attention_mma.h; each attention_mma_hd*.cu compiles it for one head size.
//
// A CTA walks its share of the work list (attention_work.cuh). The warps stand in kRowWarps x kKeyWarps: a row warp has 16 packed
// query rows, or all where they are few, a key warp has kSlice keys of every block. Warps with the same keys (a team) fill a ring
// of stages in shared memory, which runs ahead over the ends of tiles. With one row warp a team is a single warp, and the main loop
// has no CTA barrier.
#pragma once

#include <type_traits>

#include "backends/cuda/attention_mma_tile.cuh"
#include "backends/cuda/launch.cuh"

namespace maga::cuda {

template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kCtas) attention_mma_kernel(const __grid_constant__ MmaArgs args) {
#if __CUDA_ARCH__ >= 800
  using T = typename S::T;
  extern __shared__ __align__(128) unsigned char shared[];
  allow_next();
  if (!args.early) wait_for_previous();
  const WorkStart start = args.work.starts[blockIdx.x];
  const int first_zero = args.zero_to > 0 ? *args.token_count : 0;
  const auto zero_rest = [&] {
    for (int row = first_zero + blockIdx.x; row < args.zero_to; row += gridDim.x)
      for (int i = threadIdx.x; i < args.shape.group * args.shape.kv_heads * S::kHeadDim / 2; i += S::kThreads)
        reinterpret_cast<uint32_t*>(static_cast<T*>(args.out) + row * args.out_stride)[i] = 0;
  };
  if (start.blocks == 0) {
    wait_for_previous();
    return zero_rest();
  }
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
  std::conditional_t<S::kFew, MmaFew<S>, MmaRows<S>> rows;
  bool waited = !args.early;
  for (int i = 0; i < args.stages - 1; ++i) {
    if (!waited && loaded < end && loader.next_is_fresh(args, loaded > begin)) {
      wait_for_previous();
      waited = true;
    }
    load_next();
  }
  if (!waited) wait_for_previous();
  rows.start(args, at, row_warp);
  zero_rest();
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
      const MmaTile<S> tile(args, at, position, start.share);
      finish_tile(rows, tile, row_warp, key_warp, scratch);
      if (done) {
        // Waiting for other CTAs' stores and counters is left to the end, where no copies wait behind it.
        MmaCursor<S> first;
        first.start(args, args.work.starts[blockIdx.x]);
        const MmaTile<S> first_tile(args, first, begin, start.share);
        if (first_tile.ctas > 1 && begin + first.end_block - first.place.block < end) first_tile.merge();
        if (tile.ctas > 1) tile.merge();
        return;
      }
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
  return {attention_mma_kernel<S>, S::kRows, S::kBlock, S::kThreads, S::kStage, S::kScratch, S::kCtas};
}

// kFewSlice, kManySlice: keys of a block, a warp.
template <typename T, int kHeadDim, int kFewSlice, typename E = T>
MmaKernels mma_kernels_of() {
  constexpr int kManySlice = kHeadDim <= 128 ? 64 : 32;
  MmaKernels kernels{.few = mma_kernel<MmaShape<T, kHeadDim, 8, 4, kFewSlice, E>>(),
                     .many = mma_kernel<MmaShape<T, kHeadDim, 64, 1, kManySlice, E>>()};
  // Head sizes of models with more than eight query heads to a K/V head.
  if constexpr (kHeadDim == 64 || kHeadDim == 128) kernels.some = mma_kernel<MmaShape<T, kHeadDim, 16, 4, kFewSlice, E>>();
  return kernels;
}

template <int kHeadDim>
MmaKernels mma_kernels(DType type) {
  return type == DType::f16 ? mma_kernels_of<__half, kHeadDim, 16>() : mma_kernels_of<__nv_bfloat16, kHeadDim, 16>();
}

template <int kHeadDim>
MmaKernels mma_code_kernels(DType kv_type) {
  switch (kv_type) {
    case DType::i8: return mma_kernels_of<__half, kHeadDim, 32, Coded<DType::i8>>();
    case DType::f8_e4m3: return mma_kernels_of<__half, kHeadDim, 32, Coded<DType::f8_e4m3>>();
    case DType::f8_e5m2: return mma_kernels_of<__half, kHeadDim, 32, Coded<DType::f8_e5m2>>();
    default: return {};
  }
}

}  // namespace maga::cuda
