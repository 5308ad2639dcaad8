// What the kernels of prepare_qkv share.
#pragma once

#include "backends/cuda/kv_codes.cuh"
#include "backends/cuda/rows.cuh"

namespace maga::cuda {

constexpr int kWarp = 32;

template <typename T, typename KV>
struct PrepareCall {
  Rows<T> q, k, v;
  const float* slabs;
  const T* slab_bias;
  int slab_count;
  int rows, heads, kv_heads, v_heads, head_dim, v_dim;  // v_heads: 0 where the values are in the keys
  const T* q_norm;
  const T* k_norm;
  float eps, weight_offset;
  int rotary_dim;  // 0: no rope
  bool interleaved, keep_k;
  const float2* turns;  // (rows, rotary_dim / 2)
  KV* k_pages;
  KV* v_pages;
  int64_t page_stride, k_head_stride, v_head_stride;
  int page_shift;
  const int64_t* slots;
  // Of pages of codes.
  DType code;
  uint16_t* k_scales;
  uint16_t* v_scales;
  int64_t scale_stride;
  float k_scale, v_scale;

  // The scale of one head of keys or values whose numbers are up to `magnitude` in size; one thread of the head has it stored.
  __device__ __forceinline__ float scale(bool is_k, int kv_head, int64_t page, int64_t place, uint32_t magnitude,
                                         bool store) const {
    const uint16_t bits = scale_of_codes(code, magnitude, is_k ? k_scale : v_scale);
    if (store) (is_k ? k_scales : v_scales)[page * scale_stride + (int64_t{kv_head} << page_shift) + place] = bits;
    return scale_to_float(bits);
  }
};

// The largest over a team of `lanes` neighbouring threads, a power of two.
__device__ __forceinline__ uint32_t team_max(uint32_t x, int lanes, unsigned team_mask) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) x = max(x, __shfl_xor_sync(team_mask, x, offset));
  return x;
}
__device__ __forceinline__ unsigned team_mask_of(int lanes) {
  return lanes == kWarp ? ~0u : ((1u << lanes) - 1) << (threadIdx.x % kWarp / lanes * lanes);
}

// Heads whose columns c and c + head_dim / 2 are rotated together, or not at all; false if the heads are others.
// KV is T or Code.
template <typename T, typename KV>
bool prepare_pairs(const Queue& queue, const PrepareCall<T, KV>& call);

}  // namespace maga::cuda
