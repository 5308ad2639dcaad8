// The shape of an attention_mma kernel, its way through the work list, and the copies of keys and values.
#pragma once

#include "backends/cuda/attention_mma.h"
#include "backends/cuda/attention_tensor.cuh"
#include "backends/cuda/kv_codes.cuh"

namespace maga::cuda {

constexpr float kLog2e = 1.4426950408889634f;

// Pages of codes. Their numbers become fp16, whatever the type of q is.
template <DType kType_>
struct Coded {
  static constexpr DType kType = kType_;
  uint8_t bits;
};

template <typename E>
constexpr DType code_type = DType::i8;
template <DType kType>
constexpr DType code_type<Coded<kType>> = kType;

// The unit of a row of q whose largest magnitude has these bits: its power of two; 1 where one of the numbers is not finite, and
// within what has an inverse.
__device__ __forceinline__ uint32_t q_unit_bits(uint32_t most) {
  return most >= 0x7f800000u ? 0x3f800000u : min(max(most & 0x7f800000u, 0x00800000u), 0x7e800000u);
}

// T: what is multiplied. E: an element of the pages, T or Coded. With one key warp there is a row warp for 16 rows; with several
// (few rows) there is one row warp.
template <typename T_, int kHeadDim_, int kRows_, int kKeyWarps_, int kSlice_, typename E_ = T_>
struct MmaShape {
  using T = T_;
  using E = E_;
  static constexpr bool kCodes = sizeof(E) == 1;
  static constexpr int kHeadDim = kHeadDim_, kRows = kRows_, kKeyWarps = kKeyWarps_, kSlice = kSlice_;
  static constexpr bool kFew = kKeyWarps > 1;
  static_assert(!kFew || kRows <= 16);
  static constexpr int kRowWarps = kFew ? 1 : kRows / 16;
  static constexpr int kBlock = kSlice * kKeyWarps;
  static constexpr int kTeam = 32 * kRowWarps;  // threads
  static constexpr int kThreads = kTeam * kKeyWarps;
  // Rows in shared memory, in bytes. ldmatrix reads the same 16-byte piece of 8 rows and must meet no bank twice: a row is an odd
  // number of pieces or, where that would cost more room than there is, its pieces change places from row to row.
  static constexpr int kPieces = kHeadDim * sizeof(E) / 16;
  static constexpr bool kTurned = (kCodes || kFew) && (kPieces & (kPieces - 1)) == 0;
  static_assert(!kTurned || kPieces >= 4);
  static constexpr int kPitch = (kTurned ? kPieces : kPieces | 1) * 16;
  static constexpr int kTurns = kPieces == 4 ? 3 : 7;
  static __device__ __forceinline__ int place(int row, int piece) {
    const int turn = kPieces == 4 ? row >> 1 & 3 : row & 7;
    return row * kPitch + (kTurned ? piece ^ turn : piece) * 16;
  }
  // From where one piece of a row lies to where the i-th after it does, if the two numbers share no bits.
  static __device__ __forceinline__ uint32_t after(uint32_t first, int i) {
    return kTurned ? (first ^ (i & kTurns) * 16) + (i & ~kTurns) * 16 : first + i * 16;
  }
  static constexpr int kHalf = kSlice * kPitch;                                 // keys, then values
  static constexpr int kTeamStage = 2 * kHalf + (kCodes ? 2 * kSlice * 2 : 0);  // then the scales of both
  static_assert(!kTurned || kTeamStage % 128 == 0);
  static constexpr int kStage = kTeamStage * kKeyWarps;
  static constexpr int kGroups = kSlice / 16;  // runs of 16 keys, which lie in one page
  // Where key warps add up their results: rows, then maximum and sum of each warp's rows.
  static constexpr int kScratchPitch = kHeadDim + 4;  // 4 more than a multiple of 8: rows that are two apart meet in no bank
  static constexpr int kScratch = kFew ? 16 * kScratchPitch * 4 + (kKeyWarps + 1) * kRows * 8 : 0;
  static constexpr int kCtas = kFew ? (kHeadDim <= 128 ? (kRows == 8 ? 3 : 2) : 1) : kHeadDim <= 128 ? 2 : 1;  // an SM, at least
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
    using E = typename S::E;
    constexpr int kAll = S::kSlice * S::kPieces, kLoads = divide_up(kAll, S::kTeam);
    constexpr int kUnroll = kLoads < 8 ? kLoads : 8;  // more would cost registers that the largest head size does not have
    if (page_block < 0 || at.place.block - page_block >= 32 / S::kGroups) read_pages(args, key_warp);
    const int run = (at.place.block - page_block) * S::kGroups;
    const int first_key = at.place.block * S::kBlock + key_warp * S::kSlice;
    const int in_page = (1 << args.page_shift) - 1;
    const int64_t head = at.place.head * args.head_stride;
    const E* k = static_cast<const E*>(args.k) + head;
    const E* v = static_cast<const E*>(args.v) + head;
#pragma unroll kUnroll
    for (int i = 0; i < kLoads; ++i) {
      const int piece = threadIdx.x % S::kTeam + i * S::kTeam;
      const int row = piece / S::kPieces, in_row = piece % S::kPieces, key = first_key + row;
      const int id = __shfl_sync(~0u, page, run + row / 16);
      if (kAll % S::kTeam != 0 && piece >= kAll) break;
      const int64_t from = id * args.page_stride + (key & in_page) * S::kHeadDim + in_row * (16 / sizeof(E));
      const uint32_t to = stage + S::place(row, in_row);
      const bool wanted = key < at.sequence.kv_length;
      copy_async(to, k + from, wanted);
      copy_async(to + S::kHalf, v + from, wanted);
    }
    if constexpr (S::kCodes) {  // a thread for 8 scales of keys or of values
      constexpr int kThreads = S::kSlice / 8;
      const int thread = threadIdx.x % S::kTeam, row = thread % kThreads * 8, key = first_key + row;
      const int id = __shfl_sync(~0u, page, run + row / 16);
      if (thread < 2 * kThreads) {
        const uint16_t* scales = thread < kThreads ? args.k_scales : args.v_scales;
        const int64_t from = id * args.scale_stride + (static_cast<int64_t>(at.place.head) << args.page_shift) + (key & in_page);
        copy_async(stage + 2 * S::kHalf + thread * 16, scales + from, key < at.sequence.kv_length);
      }
    }
  }
  __device__ void advance(const MmaArgs& args) {
    at.advance(args);
    if (at.place.block == at.first_block) page_block = -1;
  }
  // Whether this step writes keys of the block here or, `advanced`, of the one after it.
  __device__ bool next_is_fresh(const MmaArgs& args, bool advanced) const {
    MmaCursor<S> next = at;
    if (advanced) next.advance(args);
    return (next.place.block + 1) * S::kBlock > next.sequence.kv_length - next.sequence.tokens;
  }
};

}  // namespace maga::cuda
