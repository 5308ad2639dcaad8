// A checker whose weights are random codes.
#pragma once

#include "cuda_linear_checker.cuh"
#include "cuda_linear_quantized.h"

namespace maga::bench {

struct CodedChecker {
  explicit CodedChecker(cudaStream_t stream) : checker(stream) {
    // A kernel may round weights otherwise than what it is compared with; e4m3's larger numbers are rounded there only.
    checker.limits = [this](const Case& c, bool own) {
      const float rounding = (c.type == DType::bf16 ? 1.3e-2f : 1.7e-3f) * (form.e4m3 ? 3.f : 1.f);
      return Limits{std::max(limits_of_rounding(c, own).worst, rounding * (c.gated ? 3.f : 1.f))};
    };
    checker.weights = [this, stream](const Case& c, uint32_t seed, LinearArgs* call) {
      const int64_t rows = c.gated ? 2 * c.n : c.n;
      make(stream, c.type, rows, c.k, seed, c.name());
      call->weight = coded.units();
      call->layout = coded.layout();
      return Numbers{c.type, dense.at(), c.k};
    };
  }
  void take(const CodeForm& next) {
    form = next;
    checker.about = concat(", ", form.name());
  }
  // Units, and `dense` of them.
  void make(cudaStream_t stream, DType type, int64_t rows, int64_t k, uint32_t seed, const std::string& what) {
    MAGA_CHECK(rows * k * size_of(type) <= static_cast<int64_t>(dense.bytes()), what);
    coded.make(stream, form, type, rows, k, seed);
    // Poisoned, so that what is not unpacked shows.
    MAGA_CUDA(cudaMemsetAsync(dense.at(), kPoison, rows * k * size_of(type), stream));
    cuda::affine_unpack({stream, false}, type, coded.layout().affine, coded.units(), 0, rows, k, dense.at());
    if (const float error = coded.error(stream, dense.at(), type); error > 1 && ++wrong <= 20)
      std::printf("WRONG values of %s, %s: %g of what rounding explains\n", form.name().c_str(), what.c_str(), error);
  }

  Checker checker;
  CodedWeight coded{16 << 20};
  DeviceBuffer dense{64 << 20};
  CodeForm form;
  int wrong = 0;
};

}  // namespace maga::bench
