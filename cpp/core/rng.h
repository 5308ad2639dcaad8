// Counter-based random numbers (Philox 4x32-10, Salmon et al. 2011): the n-th draw of a stream depends on nothing else,
// so a seed gives the same text alone, in any batch, and after preemption.
#pragma once

#include <array>
#include <cstdint>

// Where a CUDA compiler reads this, its kernels may call it too.
#ifdef __CUDACC__
#define MAGA_HOST_DEVICE __host__ __device__
#else
#define MAGA_HOST_DEVICE
#endif

namespace maga {

MAGA_HOST_DEVICE inline std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

// Uniform in [0, 1) with 53 bits: draw `index` of stream `stream` under `seed`.
MAGA_HOST_DEVICE inline double uniform(uint64_t seed, uint64_t stream, uint64_t index) {
  const auto r = philox4x32({static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), static_cast<uint32_t>(stream),
                             static_cast<uint32_t>(stream >> 32)},
                            {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  const uint64_t bits = (uint64_t{r[0]} << 32 | r[1]) >> 11;
  return static_cast<double>(bits) * 0x1p-53;
}

}  // namespace maga
