// A CTA for a query row of one head; its warps share the keys. Scores: a lane a key. Values: a lane every 32nd column.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backends/cuda/attention_generic.h"
#include "backends/cuda/attention_work.cuh"
#include "backends/cuda/kv_codes.cuh"
#include "backends/cuda/launch.cuh"

namespace maga::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kColumns = kGenericHeadDim / 32;  // of the values, a lane

__device__ float to_float(float x) { return x; }
__device__ float to_float(__half x) { return __half2float(x); }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void from_float(float& to, float x) { to = x; }
__device__ void from_float(__half& to, float x) { to = __float2half(x); }
__device__ void from_float(__nv_bfloat16& to, float x) { to = __float2bfloat16(x); }

__device__ float warp_max(float x) {
  for (int i = 16; i > 0; i /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, i));
  return x;
}
__device__ float warp_sum(float x) {
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(~0u, x, i);
  return x;
}

// (grid: tokens, heads)
template <typename T, typename K>
__global__ void __launch_bounds__(kWarps * 32)
    attention_generic_kernel(DeviceStep step, AttentionShape shape, AttentionArgs args, DType kv_type) {
  constexpr bool kCodes = std::is_same_v<K, Code>;
  __shared__ float q[kGenericHeadDim];
  __shared__ float values[kWarps][kGenericHeadDim];
  __shared__ float2 sums[kWarps];
  allow_next();
  wait_for_previous();
  const int token = blockIdx.x, head = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  T* out = static_cast<T*>(args.out) + token * args.out_stride + head * shape.v_dim;
  if (token >= step.sequence_start[step.sequences]) {
    for (int i = threadIdx.x; i < shape.v_dim; i += blockDim.x) from_float(out[i], 0);
    return;
  }
  const T* q_row = static_cast<const T*>(args.q) + token * args.q_stride + head * shape.head_dim;
  for (int i = threadIdx.x; i < shape.head_dim; i += blockDim.x) q[i] = to_float(q_row[i]);
  __syncthreads();

  const int sequence = step.token_sequence[token], first = step.sequence_start[sequence];
  const int tokens = step.sequence_start[sequence + 1] - first, kv_length = step.kv_length[sequence];
  const int before = kv_length - tokens, limit = before + token - first + 1;
  const bool tree = step.tree_mask != nullptr && tokens <= kTreeTokens;
  const uint64_t tree_mask = tree ? step.tree_mask[token] : 0;
  const int low = shape.window > 0 ? max(0, limit - static_cast<int>(shape.window)) : 0;
  const int context = step.context != nullptr ? step.context[sequence] : 0, high = tree ? kv_length : max(limit, context);
  const KvLayer& layer = args.layer;
  const int kv_head = head / (shape.heads / shape.kv_heads);
  const K* k_head = static_cast<const K*>(layer.k) + kv_head * layer.k_head_stride;
  const K* v_head = static_cast<const K*>(layer.v) + kv_head * layer.v_head_stride;
  const int32_t* pages = step.pages + step.page_start[sequence];
  const float slope = args.alibi_slopes != nullptr ? args.alibi_slopes[head] : 0;

  const auto element = [&](K x) {
    if constexpr (kCodes)
      return code_to_float(kv_type, x);
    else
      return to_float(x);
  };
  float value[kColumns] = {}, maximum = -INFINITY, sum = 0;
  for (int base = low + warp * 32; base < high; base += kWarps * 32) {
    const int key = base + lane;
    int64_t page = 0;
    int in_page = 0;
    float score = -INFINITY, v_scale = 1;
    if (key < high) {
      page = pages[key / layer.page_tokens] * layer.page_stride, in_page = key % layer.page_tokens;
      if (!tree || key < before || (tree_mask >> (key - before) & 1) != 0) {
        const K* k = k_head + page + in_page * shape.head_dim;
        score = 0;
#pragma unroll 8
        for (int i = 0; i < shape.head_dim; ++i) score += q[i] * element(k[i]);
        if constexpr (kCodes) {
          const int64_t entry = pages[key / layer.page_tokens] * layer.scale_stride + kv_head * layer.page_tokens + in_page;
          score *= scale_to_float(layer.k_scales[entry]);
          v_scale = scale_to_float(layer.v_scales[entry]);
        }
        score *= args.scale;
        if (args.soft_cap > 0) score = args.soft_cap * tanhf(score / args.soft_cap);
        score += slope * (key - (limit - 1));
        if (score == -INFINITY) score = NAN;  // of an infinite query: not to be taken for a key that is not seen
      }
    }
    const float most = fmaxf(maximum, warp_max(score));
    if (most == -INFINITY && !__any_sync(~0u, isnan(score))) continue;  // nothing seen yet; but a NaN must stay visible
    const float shrink = expf(maximum - most), p = expf(score - most);
    sum = sum * shrink + warp_sum(p), maximum = most;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) value[c] *= shrink;
    for (int j = 0; j < min(32, high - base); ++j) {
      const K* v = v_head + __shfl_sync(~0u, page, j) + __shfl_sync(~0u, in_page, j) * layer.v_stride();
      const float weight = __shfl_sync(~0u, p * v_scale, j);
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        if (c * 32 + lane < shape.v_dim) value[c] += weight * element(v[c * 32 + lane]);
    }
  }

  if (lane == 0) sums[warp] = {maximum, sum};
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
    if (c * 32 + lane < shape.v_dim) values[warp][c * 32 + lane] = value[c];
  __syncthreads();
  float most = args.sinks != nullptr ? to_float(static_cast<const T*>(args.sinks)[head]) : -INFINITY;
  float all = 0;
  const float sink = most;
  for (int w = 0; w < kWarps; ++w) most = fmaxf(most, sums[w].x);
  if (args.sinks != nullptr) all = expf(sink - most);
  for (int w = 0; w < kWarps; ++w)
    if (sums[w].y != 0) all += sums[w].y * expf(sums[w].x - most);
  for (int i = threadIdx.x; i < shape.v_dim; i += blockDim.x) {
    float x = 0;
    for (int w = 0; w < kWarps; ++w)
      if (sums[w].y != 0) x += values[w][i] * expf(sums[w].x - most);
    from_float(out[i], all != 0 ? x / all : 0);
  }
}

template <typename T>
void dispatch(const Queue& queue, const DeviceStep& step, const GenericArgs& args) {
  const auto run = [&](auto kernel) {
    launch(queue, kernel, dim3(step.tokens, args.shape.heads), kWarps * 32, 0, step, args.shape, args.attention, args.kv_type);
  };
  if (is_code(args.kv_type)) return run(attention_generic_kernel<T, Code>);
  switch (args.kv_type) {
    case DType::f32: return run(attention_generic_kernel<T, float>);
    case DType::f16: return run(attention_generic_kernel<T, __half>);
    case DType::bf16: return run(attention_generic_kernel<T, __nv_bfloat16>);
    default: MAGA_CHECK(false, "no attention over pages of ", name_of(args.kv_type));
  }
}

}  // namespace

void attention_generic(const Queue& queue, const DeviceStep& step, const GenericArgs& args) {
  switch (args.type) {
    case DType::f32: return dispatch<float>(queue, step, args);
    case DType::f16: return dispatch<__half>(queue, step, args);
    case DType::bf16: return dispatch<__nv_bfloat16>(queue, step, args);
    default: MAGA_CHECK(false, "no attention in ", name_of(args.type));
  }
}

}  // namespace maga::cuda
