// Widens a vector once, at load.
#include "backends/cpu/vector_weight.h"

namespace maga::cpu {

std::shared_ptr<const VectorWeight> pack_vector(const WeightSpec& spec, const Canonical& weight) {
  const Dense* dense = std::get_if<Dense>(&weight);
  MAGA_REQUIRE(dense, spec.name, ": a vector must be fp32, fp16 or bf16, not quantised");
  const Tensor& tensor = dense->values;
  MAGA_REQUIRE(tensor.shape == spec.shape, spec.name, ": ", tensor.elements(), " elements where ", spec.shape[0], " belong");
  MAGA_REQUIRE(tensor.dtype == DType::f32 || tensor.dtype == DType::f16 || tensor.dtype == DType::bf16, spec.name, ": a vector of ",
               name_of(tensor.dtype), "; fp32, fp16 or bf16 is needed");
  std::vector<float> values(spec.shape[0]);
  for (int64_t i = 0; i < spec.shape[0]; ++i) values[i] = float_at(tensor, i);
  return std::make_shared<VectorWeight>(std::move(values));
}

}  // namespace maga::cpu
