#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <numeric>

#include "backends/cuda/kv_codes.cuh"
#include "cuda_attention.h"

namespace maga::cuda {
namespace {

__device__ double get(const void* from, DType type, int64_t i) {
  switch (type) {
    case DType::f32: return static_cast<const float*>(from)[i];
    case DType::f16: return __half2float(static_cast<const __half*>(from)[i]);
    default: return __bfloat162float(static_cast<const __nv_bfloat16*>(from)[i]);
  }
}
__device__ void set(void* to, DType type, int64_t i, float x) {
  switch (type) {
    case DType::f32: static_cast<float*>(to)[i] = x; break;
    case DType::f16: static_cast<__half*>(to)[i] = __float2half(x); break;
    default: static_cast<__nv_bfloat16*>(to)[i] = __float2bfloat16(x);
  }
}

// Element i of pages; `entry`: where its scale is, if it has one.
__device__ double get_entry(const void* from, DType type, int64_t i, const uint16_t* scales, int64_t entry) {
  if (!is_code(type)) return get(from, type, i);
  return static_cast<double>(code_to_float(type, static_cast<const Code*>(from)[i])) * scale_to_float(scales[entry]);
}

// Uniform with variance 1, from a hash of the place.
__device__ float noise(uint64_t i, uint32_t seed) {
  uint32_t h = static_cast<uint32_t>(i) * 0x9E3779B1u ^ static_cast<uint32_t>(i >> 32) * 0xC2B2AE3Du ^ seed * 0x85EBCA77u;
  h ^= h >> 15, h *= 0x2C1B3C6Du, h ^= h >> 12, h *= 0x297A2D39u, h ^= h >> 15;
  return ((h >> 8) * (2.f / 16777216.f) - 1.f) * 1.732f;
}

__global__ void fill_random_kernel(void* to, DType type, size_t count, uint32_t seed) {
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<size_t>(gridDim.x) * blockDim.x)
    set(to, type, i, noise(i, seed));
}

__global__ void fill_pages_kernel(KvLayer layer, DType type, DeviceStep step, uint32_t seed) {
  const int sequence = blockIdx.x, width = layer.head_dim + layer.v_dim;
  const int64_t count = static_cast<int64_t>(step.kv_length[sequence]) * layer.kv_heads * width;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    const int column = i % width, head = i / width % layer.kv_heads, key = i / width / layer.kv_heads;
    const int64_t id = step.pages[step.page_start[sequence] + key / layer.page_tokens], page = id * layer.page_stride;
    const int in_page = key % layer.page_tokens;
    const bool is_k = column < layer.head_dim;
    const int64_t to = is_k ? page + head * layer.k_head_stride + in_page * layer.head_dim + column
                            : page + head * layer.v_head_stride + in_page * layer.v_dim + column - layer.head_dim;
    const float x = noise(i, seed + sequence);
    if (!is_code(type)) {
      set(is_k ? layer.k : layer.v, type, to, x);
      continue;
    }
    // Codes of the whole range; sizes that differ from key to key.
    static_cast<Code*>(is_k ? layer.k : layer.v)[to].bits = float_to_code(type, x * largest_code(type) / 1.7321f);
    const float size = exp2f(noise(i - column, seed + sequence + (is_k ? 77 : 99)));
    (is_k ? layer.k_scales : layer.v_scales)[id * layer.scale_stride + head * layer.page_tokens + in_page] =
        __bfloat16_as_ushort(__float2bfloat16(size * 1.7321f / largest_code(type)));
  }
}

// (grid: tokens, heads; shared: a double a key)
__global__ void attention_reference_kernel(double* out, DType type, DType kv_type, AttentionShape shape, DeviceStep step,
                                           AttentionArgs args) {
  extern __shared__ double score[];
  const int token = blockIdx.x, head = blockIdx.y, kv_head = head / (shape.heads / shape.kv_heads);
  double* row = out + (static_cast<int64_t>(token) * shape.heads + head) * shape.v_dim;
  if (step.slots[token] < 0) {
    for (int i = threadIdx.x; i < shape.v_dim; i += blockDim.x) row[i] = 0;
    return;
  }
  const int sequence = step.token_sequence[token], first = step.sequence_start[sequence];
  const int tokens = step.sequence_start[sequence + 1] - first, length = step.kv_length[sequence], before = length - tokens;
  const int index = before + token - first;
  const KvLayer& layer = args.layer;
  const auto id = [&](int key) -> int64_t { return step.pages[step.page_start[sequence] + key / layer.page_tokens]; };
  const auto page = [&](int key) { return id(key) * layer.page_stride; };
  const auto entry = [&](int key) { return id(key) * layer.scale_stride + kv_head * layer.page_tokens + key % layer.page_tokens; };
  for (int key = threadIdx.x; key < length; key += blockDim.x) {
    bool seen = key <= index;
    if (step.tree_mask != nullptr && tokens <= 64 && key >= before) seen = step.tree_mask[token] >> (key - before) & 1;
    if (shape.window > 0 && key <= index - shape.window) seen = false;
    double dot = 0;
    const int64_t k = page(key) + kv_head * layer.k_head_stride + key % layer.page_tokens * shape.head_dim;
    for (int i = 0; i < shape.head_dim; ++i)
      dot += get(args.q, type, token * args.q_stride + head * shape.head_dim + i) *
             get_entry(layer.k, kv_type, k + i, layer.k_scales, entry(key));
    dot *= args.scale;
    if (args.soft_cap > 0) dot = args.soft_cap * tanh(dot / args.soft_cap);
    if (args.alibi_slopes != nullptr) dot += static_cast<double>(args.alibi_slopes[head]) * (key - index);
    score[key] = seen ? dot : -INFINITY;
  }
  __syncthreads();
  double most = args.sinks != nullptr ? get(args.sinks, type, head) : -INFINITY;
  double sum = 0;
  const double sink = most;
  for (int key = 0; key < length; ++key) most = fmax(most, score[key]);
  if (args.sinks != nullptr) sum = exp(sink - most);
  for (int key = 0; key < length; ++key) sum += exp(score[key] - most);
  for (int i = threadIdx.x; i < shape.v_dim; i += blockDim.x) {
    double x = 0;
    for (int key = 0; key < length; ++key)
      if (score[key] != -INFINITY)
        x += exp(score[key] - most) *
             get_entry(layer.v, kv_type, page(key) + kv_head * layer.v_head_stride + key % layer.page_tokens * shape.v_dim + i,
                       layer.v_scales, entry(key));
    row[i] = x / sum;
  }
}

__global__ void copy_own_keys_kernel(void* k, void* v, int64_t k_stride, int64_t v_stride, DType type, KvLayer layer, DType kv_type,
                                     DeviceStep step) {
  const int token = blockIdx.x;
  const int64_t slot = step.slots[token];
  if (slot < 0) return;
  const int64_t id = slot / layer.page_tokens, page = id * layer.page_stride, in_page = slot % layer.page_tokens;
  const auto copy = [&](void* to, int64_t stride, const void* from, int64_t head_stride, int width, const uint16_t* scales) {
    for (int i = threadIdx.x; i < layer.kv_heads * width; i += blockDim.x)
      set(to, type, token * stride + i,
          get_entry(from, kv_type, page + i / width * head_stride + in_page * width + i % width, scales,
                    id * layer.scale_stride + i / width * layer.page_tokens + in_page));
  };
  copy(k, k_stride, layer.k, layer.k_head_stride, layer.head_dim, layer.k_scales);
  copy(v, v_stride, layer.v, layer.v_head_stride, layer.v_dim, layer.v_scales);
}

}  // namespace

int64_t page_bytes_of(const AttentionShape& shape, DType kv_type, int page_tokens, PageBytes other) {
  const CacheLayer layer{shape.kv_heads, shape.head_dim, shape.v_dim};
  return other.before + layer.entry_bytes(kv_type) * page_tokens + other.rest;
}

KvLayer layer_in(void* pool, const AttentionShape& shape, DType kv_type, int page_tokens, PageBytes other) {
  const int64_t size = size_of(kv_type), entries = int64_t{shape.kv_heads} * page_tokens;
  const int64_t page_bytes = page_bytes_of(shape, kv_type, page_tokens, other);
  uint8_t* const k = static_cast<uint8_t*>(pool) + other.before;
  uint8_t* const v = k + entries * shape.head_dim * size;
  auto* scales = is_code(kv_type) ? reinterpret_cast<uint16_t*>(v + entries * shape.v_dim) : nullptr;
  return {.k = k,
          .v = v,
          .page_stride = page_bytes / size,
          .k_head_stride = int64_t{page_tokens} * shape.head_dim,
          .v_head_stride = int64_t{page_tokens} * shape.v_dim,
          .page_tokens = page_tokens,
          .kv_heads = shape.kv_heads,
          .head_dim = shape.head_dim,
          .v_dim = shape.v_dim,
          .k_scales = scales,
          .v_scales = scales ? scales + entries : nullptr,
          .scale_stride = page_bytes / 2};
}

void fill_random(void* to, DType type, size_t count, uint32_t seed) {
  fill_random_kernel<<<1024, 256>>>(to, type, count, seed);
  MAGA_CUDA(cudaGetLastError());
}

void fill_pages(const KvLayer& layer, DType type, const DeviceStep& step, uint32_t seed) {
  fill_pages_kernel<<<step.sequences, 512>>>(layer, type, step, seed);
  MAGA_CUDA(cudaGetLastError());
}

void copy_own_keys(void* k, void* v, int64_t k_stride, int64_t v_stride, DType type, const KvLayer& layer, DType kv_type,
                   const DeviceStep& step) {
  copy_own_keys_kernel<<<step.tokens, 128>>>(k, v, k_stride, v_stride, type, layer, kv_type, step);
  MAGA_CUDA(cudaGetLastError());
}

void attention_reference(double* out, DType type, DType kv_type, const AttentionShape& shape, const DeviceStep& step,
                         const AttentionArgs& args) {
  const int shared = 4096 * sizeof(double);
  attention_reference_kernel<<<dim3(step.tokens, shape.heads), 128, shared>>>(out, type, kv_type, shape, step, args);
  MAGA_CUDA(cudaGetLastError());
}

MadeStep::MadeStep(const StepSizes& shape, int64_t pool_pages, bool tree, std::mt19937& random) {
  std::vector<int32_t> pool(pool_pages);
  std::iota(pool.begin(), pool.end(), 0);
  std::shuffle(pool.begin(), pool.end(), random);
  size_t next_page = 0;
  sequence_start = {0}, page_start = {0};
  for (const SequenceSize& size : shape.sequences) {
    const int count = (size.kv_length + shape.page_tokens - 1) / shape.page_tokens;
    MAGA_CHECK(next_page + count <= pool.size(), "pool of ", pool.size(), " pages");
    const int32_t* own = pool.data() + next_page;
    pages.insert(pages.end(), own, own + count);
    next_page += count;
    for (int i = 0; i < size.tokens; ++i) {
      const int key = size.kv_length - size.tokens + i;
      slots.push_back(static_cast<int64_t>(own[key / shape.page_tokens]) * shape.page_tokens + key % shape.page_tokens);
      token_sequence.push_back(static_cast<int32_t>(kv_length.size()));
      positions.push_back(key);
      // Itself, and of what is before it a random half.
      tree_mask.push_back((1ull << (i & 63)) | ((1ull << (i & 63)) - 1 & (static_cast<uint64_t>(random()) << 32 | random())));
    }
    kv_length.push_back(size.kv_length);
    sequence_start.push_back(sequence_start.back() + size.tokens);
    page_start.push_back(static_cast<int32_t>(pages.size()));
  }
  ids.assign(positions.size(), 1);
  host = {.ids = ids,
          .positions = positions,
          .sequence_start = {sequence_start.data(), sequence_start.size()},
          .kv_length = {kv_length.data(), kv_length.size()},
          .page_start = {page_start.data(), page_start.size()},
          .pages = pages};

  const auto padded = [](auto list, int count, auto with) {
    list.insert(list.end(), count, with);
    return list;
  };
  const auto up = [&](const std::vector<int32_t>& list) {
    return arrays_.emplace_back(std::make_unique<DeviceArray<int32_t>>(list))->get();
  };
  device.tokens = static_cast<int>(ids.size()) + shape.padding_tokens;
  device.sequences = static_cast<int>(kv_length.size()) + shape.padding_sequences;
  device.sequence_start = up(padded(sequence_start, shape.padding_sequences, sequence_start.back()));
  device.kv_length = up(padded(kv_length, shape.padding_sequences, 0));
  device.page_start = up(padded(page_start, shape.padding_sequences, page_start.back()));
  device.pages = up(padded(pages, 64, 1 << 30));  // no page has this id
  device.token_sequence = up(padded(token_sequence, shape.padding_tokens, 1 << 30));
  slots_ = std::make_unique<DeviceArray<int64_t>>(padded(slots, shape.padding_tokens, int64_t{-1}));
  device.slots = slots_->get();
  if (tree) {
    masks_ = std::make_unique<DeviceArray<uint64_t>>(tree_mask);
    device.tree_mask = masks_->get();
  }
}

}  // namespace maga::cuda
