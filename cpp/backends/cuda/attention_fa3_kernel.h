// The kernels of FlashAttention-3 as plain functions, so that FlashInfer stays in attention_fa3_hd*.cu.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace maga::cuda {

struct Fa3Call {
  const void* q = nullptr;
  void* out = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  int64_t q_stride = 0, out_stride = 0;
  int tokens = 0, heads = 0, kv_heads = 0;
  float scale = 1;
  // Keys and values in pages.
  int64_t page_stride = 0, head_stride = 0;
  int page_tokens = 0;
  const int32_t* pages = nullptr;
  // Or a row a token of the step.
  int64_t k_stride = 0, v_stride = 0;
  // Items of work by CTA: work_start (SMs + 1), the others (items).
  const int32_t* work_start = nullptr;
  const int32_t* tile = nullptr;         // of the sequence's tokens
  const int32_t* head = nullptr;         // query head
  const int32_t* first_token = nullptr;  // of the sequence
  const int32_t* first_page = nullptr;   // of the sequence, in `pages`
  const int32_t* q_length = nullptr;
  const int32_t* kv_length = nullptr;
};

using Fa3Run = cudaError_t (*)(const Fa3Call& call, cudaStream_t stream);
struct Fa3Kernel {
  Fa3Run paged = nullptr;
  Fa3Run fresh = nullptr;  // over the step's own rows, for sequences without earlier tokens
  int tile = 0;            // tokens
};

#define MAGA_FA3_KERNELS(X) X(64, bf16) X(64, f16) X(128, bf16) X(128, f16) X(256, bf16) X(256, f16)
#define MAGA_DECLARE(d, type) Fa3Kernel attention_fa3_hd##d##_##type();
MAGA_FA3_KERNELS(MAGA_DECLARE)
#undef MAGA_DECLARE

}  // namespace maga::cuda
