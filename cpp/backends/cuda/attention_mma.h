// Flash attention over pages with mma.sync, sm_80 and later, fp16 and bf16, with pages of the same type or of 8-bit codes.
#pragma once

#include "backends/cuda/attention_work.cuh"
#include "backends/cuda/device_step.h"
#include "backends/cuda/queue.h"
#include "core/dtype.h"

namespace maga::cuda {

struct MmaArgs {
  const void* q = nullptr;  // (tokens, heads * head_dim)
  void* out = nullptr;      // (tokens, heads * head_dim)
  const void* k = nullptr;
  const void* v = nullptr;
  const uint16_t* k_scales = nullptr;  // of codes, see KvLayer
  const uint16_t* v_scales = nullptr;
  int64_t scale_stride = 0;
  bool bf16 = false;  // with codes: the type of q, out and sinks, else fp16
  int64_t q_stride = 0, out_stride = 0, page_stride = 0, head_stride = 0;
  int page_shift = 0;  // log2 of a page's tokens
  float scale = 1, soft_cap = 0;
  const float* alibi_slopes = nullptr;
  const void* sinks = nullptr;
  const uint64_t* tree_mask = nullptr;
  const int32_t* pages = nullptr;
  const int32_t* token_count = nullptr;  // on the device: tokens that are no padding
  int zero_to = 0;                       // rows from *token_count up to here are written with zeros
  WorkShape shape;
  WorkList work;
  float* partial_out = nullptr;    // (2 * ctas, rows, head_dim) not yet normalised
  float2* partial_sums = nullptr;  // (2 * ctas, rows) maximum and sum
  int* arrived = nullptr;          // (ctas) zeros, and zeros again afterwards
  int stages = 0;                  // of the ring in shared memory
  bool early = false;              // what this step does not write is read before the kernel in front is done
};

// One shape of the kernel: a tile's packed rows, a block's keys, and how it is launched.
struct MmaKernel {
  void (*kernel)(MmaArgs) = nullptr;
  int rows = 0, block_keys = 0, threads = 0;
  int stage_bytes = 0, scratch_bytes = 0;
  int ctas = 0;  // an SM, if there is room for their rings
};

// Decode and other steps whose packed rows fill one small tile, of 8 rows or of 16 (not for all head sizes); and all others.
struct MmaKernels {
  MmaKernel few, some, many;
};

// Kernels for a head size; null kernels where there are none.
MmaKernels attention_mma(DType type, DType kv_type, int head_dim);

#define MAGA_MMA_HEAD_DIMS(X) X(64) X(80) X(96) X(112) X(128) X(160) X(192) X(256)
#define MAGA_DECLARE(d)                       \
  MmaKernels attention_mma_hd##d(DType type); \
  MmaKernels attention_mma_hd##d##_codes(DType kv_type);
MAGA_MMA_HEAD_DIMS(MAGA_DECLARE)
#undef MAGA_DECLARE

}  // namespace maga::cuda
