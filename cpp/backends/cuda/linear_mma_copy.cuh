// How the ring of linear_mma.h is filled: the instructions, before the copy engine.
#pragma once

#include "backends/cuda/attention_tensor.cuh"

namespace maga::cuda {

// 16 bytes to shared memory, of which all but the first `bytes` are zeros.
__device__ __forceinline__ void copy_some(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_some(uint32_t to, const void* from, int bytes, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from), "r"(bytes), "l"(policy)
               : "memory");
}
// Of weights: read once, or by several tiles of tokens.
__device__ __forceinline__ uint64_t weight_policy(bool once) {
  uint64_t policy;
  if (once)
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  else
    asm("createpolicy.fractional.L2::evict_unchanged.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// Until all but the last `stages` - 2 groups of copies are there.
__device__ __forceinline__ void wait_for_step(int stages) {
  switch (stages) {
    case 2: return copy_wait<0>();
    case 3: return copy_wait<1>();
    case 4: return copy_wait<2>();
    case 5: return copy_wait<3>();
    case 6: return copy_wait<4>();
    case 7: return copy_wait<5>();
    default: return copy_wait<6>();
  }
}

// Eight elements of a token that does not start at a 16-byte piece; those past `left` are zeros.
template <typename T>
__device__ __forceinline__ void copy_slowly(uint32_t to, const T* from, int left) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = 2 * i < left ? reinterpret_cast<const uint16_t*>(from)[2 * i] : 0;
    const uint32_t high = 2 * i + 1 < left ? reinterpret_cast<const uint16_t*>(from)[2 * i + 1] : 0;
    words[i] = low | high << 16;
  }
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

}  // namespace maga::cuda
