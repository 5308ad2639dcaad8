// Attention for what the tensor-core kernels do not take: fp32, pages of another type, any head size, values of another size.
#pragma once

#include "backends/cuda/attention.h"

namespace maga::cuda {

constexpr int kGenericHeadDim = 576;  // at most, for keys and values

struct GenericArgs {
  AttentionShape shape;
  DType type = DType::f32, kv_type = DType::f32;
  AttentionArgs attention;
};
void attention_generic(const Queue& queue, const DeviceStep& step, const GenericArgs& args);

}  // namespace maga::cuda
