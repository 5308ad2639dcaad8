// What the kernels of prepare_qkv share.
#pragma once

#include "backends/cuda/rows.cuh"

namespace maga::cuda {

constexpr int kWarp = 32;

template <typename T, typename KV>
struct PrepareCall {
  Rows<T> q, k, v;
  const float* slabs;
  const T* slab_bias;
  int slab_count;
  int rows, heads, kv_heads, head_dim, v_dim;
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
};

// Heads whose columns c and c + head_dim / 2 are rotated together, or not at all; false if the heads are others.
template <typename T>
bool prepare_pairs(const Queue& queue, const PrepareCall<T, T>& call);

}  // namespace maga::cuda
