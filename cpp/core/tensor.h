// A shaped view of host memory with shared ownership; no maths. Weights travel from the loader to a backend in it.
#pragma once

#include <cstddef>
#include <memory>
#include <numeric>
#include <vector>

#include "core/dtype.h"

namespace maga {

struct Tensor {
  const std::byte* data = nullptr;  // row-major, contiguous
  DType dtype = DType::f32;
  std::vector<int64_t> shape;
  std::shared_ptr<const void> owner;  // keeps `data` alive

  bool empty() const { return data == nullptr; }
  int64_t elements() const {
    return std::accumulate(shape.begin(), shape.end(), int64_t{1}, [](int64_t a, int64_t b) { return a * b; });
  }
  int64_t bytes() const { return elements() * size_of(dtype); }

  template <typename T>
  const T* as() const {
    MAGA_CHECK(static_cast<int64_t>(sizeof(T)) == size_of(dtype), name_of(dtype), " read as a ", sizeof(T), "-byte type");
    return reinterpret_cast<const T*>(data);
  }
};

// Element `i` of a floating-point tensor, widened.
inline float float_at(const Tensor& t, int64_t i) {
  switch (t.dtype) {
    case DType::f32: return t.as<float>()[i];
    case DType::f16: return f16_to_float(t.as<uint16_t>()[i]);
    case DType::bf16: return bf16_to_float(t.as<uint16_t>()[i]);
    default: MAGA_CHECK(false, "not a floating-point tensor: ", name_of(t.dtype));
  }
}

}  // namespace maga
