// FlashInfer's prefill for sm_90 behind attention_fa3_kernel.h; each attention_fa3_hd*.cu compiles it for one head size and type.
#pragma once

// Stands in for FlashInfer's cutlass_utils.cuh, which would ask for curand and for tools of CUTLASS that nothing here uses.
#define FLASHINFER_CUTLASS_UTILS_CUH_
#include <cutlass/cutlass.h>
#include <cutlass/numeric_types.h>

#include <cute/tensor.hpp>

#include "backends/cuda/attention_fa3_epilogue.cuh"  // before prefill_sm90.cuh

#include <flashinfer/attention/hopper/default_params.cuh>
#include <flashinfer/attention/hopper/prefill_sm90.cuh>
#include <flashinfer/attention/hopper/variants.cuh>

#include "backends/cuda/attention_fa3_kernel.h"

namespace maga::cuda {

// What both kinds of parameters share.
template <typename Params>
Params fa3_params(const Fa3Call& call, int head_dim) {
  using T = typename Params::DTypeQ;
  Params p{};
  const auto pointer = [](const void* from) { return static_cast<T*>(const_cast<void*>(from)); };
  const auto work = [](const int32_t* from) { return const_cast<int32_t*>(from); };
  p.q_ptr = pointer(call.q), p.k_ptr = pointer(call.k), p.v_ptr = pointer(call.v), p.o_ptr = pointer(call.out);
  p.work_indptr = work(call.work_start), p.qo_tile_indices = work(call.tile), p.head_indices = work(call.head);
  p.qo_indptr = work(call.first_token), p.qo_lens = work(call.q_length), p.kv_lens = work(call.kv_length);
  p.batch_indices = work(call.tile);  // read, but used by other kinds of masks only
  p.additional_params.sm_scale = call.scale;
  p.q_stride_n = call.q_stride, p.o_stride_n = call.out_stride;
  p.q_stride_h = p.o_stride_h = head_dim;
  p.nnz_qo = call.tokens;
  p.num_qo_heads = call.heads, p.num_kv_heads = call.kv_heads, p.group_size = call.heads / call.kv_heads;
  p.window_left = -1, p.causal = true;
  return p;
}

template <typename T, int kHeadDim>
cudaError_t fa3_run_paged(const Fa3Call& call, cudaStream_t stream) {
  auto p = fa3_params<flashinfer::BatchPrefillPagedParams<T, T, T, int32_t>>(call, kHeadDim);
  p.kv_indptr = const_cast<int32_t*>(call.first_page), p.kv_indices = const_cast<int32_t*>(call.pages);
  p.k_stride_n = p.v_stride_n = kHeadDim, p.k_stride_h = p.v_stride_h = call.head_stride;
  p.k_page_stride = p.v_page_stride = call.page_stride, p.page_size = call.page_tokens;
  return flashinfer::BatchPrefillWithPagedKVCacheDispatched<kHeadDim, kHeadDim, flashinfer::MaskMode::kCausal, false, false,
                                                            flashinfer::StandardAttention>(p, false, stream);
}

template <typename T, int kHeadDim>
cudaError_t fa3_run_fresh(const Fa3Call& call, cudaStream_t stream) {
  auto p = fa3_params<flashinfer::BatchPrefillRaggedParams<T, T, T, int32_t>>(call, kHeadDim);
  p.kv_indptr = const_cast<int32_t*>(call.first_token), p.nnz_kv = call.tokens;
  p.k_stride_n = call.k_stride, p.v_stride_n = call.v_stride, p.k_stride_h = p.v_stride_h = kHeadDim;
  return flashinfer::BatchPrefillWithRaggedKVCacheDispatched<kHeadDim, kHeadDim, flashinfer::MaskMode::kCausal, false, false,
                                                             flashinfer::StandardAttention>(p, false, stream);
}

template <typename T, int kHeadDim>
Fa3Kernel fa3_kernel() {
  return {fa3_run_paged<T, kHeadDim>, fa3_run_fresh<T, kHeadDim>, kHeadDim == 64 ? 192 : 128};  // the tiles that FlashInfer chooses
}

}  // namespace maga::cuda
