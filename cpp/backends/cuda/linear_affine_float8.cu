// e4m3 codes into units, which linear_mma.h multiplies by tokens as they are.
#include "backends/cuda/launch.cuh"
#include "backends/cuda/linear_affine.h"

namespace maga::cuda {
namespace {

constexpr int kThreads = 256;

// A warp a unit: codes in the order of those of 8 bits, see linear_affine_codes.cuh, and behind them a scale for each row.
__global__ void pack_float8(const Float8Rows from, int64_t units, uint8_t* to) {
  const int64_t across = affine_units(from.cols, kUnitColumns), unit = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  if (unit >= units) return;
  const int lane = threadIdx.x % 32, t = lane % 4;
  const int64_t first_row = unit / across * kUnitRows, row = first_row + lane / 4, column = unit % across * kUnitColumns;
  uint8_t* const out = to + unit * affine_unit_bytes(kFloat8Layout);
  uint32_t words[8] = {};
  for (int step = 0; step < 8; ++step)
    for (int pair = 0; pair < 2; ++pair)
      for (int i = 0; i < 2; ++i)
        if (const int64_t at = column + step * 16 + pair * 8 + t * 2 + i; row < from.rows && at < from.cols)
          words[step] |= static_cast<uint32_t>(from.codes[row * from.cols + at]) << (i * 16 + pair * 8);
  reinterpret_cast<uint4*>(out)[lane] = *reinterpret_cast<uint4*>(words);
  reinterpret_cast<uint4*>(out)[32 + lane] = *reinterpret_cast<uint4*>(words + 4);
  if (lane >= kUnitRows) return;
  const int64_t its_row = first_row + lane;
  reinterpret_cast<float*>(out + affine_code_bytes(kFloat8Layout))[lane] =
      its_row < from.rows ? from.scale[its_row * across + unit % across] : 0.f;
}

}  // namespace

void float8_pack(cudaStream_t stream, const Float8Rows& from, void* units) {
  const int64_t count = affine_units(from.rows, kUnitRows) * affine_units(from.cols, kUnitColumns);
  launch({stream, false}, pack_float8, dim3(static_cast<unsigned>((count + kThreads / 32 - 1) / (kThreads / 32))), dim3(kThreads),
         0, from, count, static_cast<uint8_t*>(units));
}

}  // namespace maga::cuda
