// Compares a linear with sums in double precision, on random data and poisoned results; writes beside the result count as failures.
#pragma once

#include <cmath>
#include <cstdio>
#include <functional>
#include <optional>
#include <string>

#include "backends/cuda/linear_gemm.h"
#include "backends/cuda/linear_quantize.h"
#include "backends/cuda/linear_stream.h"
#include "backends/cuda/linear_tiles.h"
#include "cuda_linear.h"

namespace maga::bench {

using cuda::LinearArgs;

constexpr int kCheckThreads = 256;
constexpr uint8_t kPoison = 0xff;  // NaN in all three types

__device__ inline double value_at(DType type, const void* data, int64_t i) {
  switch (type) {
    case DType::f16: return static_cast<float>(static_cast<const __half*>(data)[i]);
    case DType::bf16: return static_cast<float>(static_cast<const __nv_bfloat16*>(data)[i]);
    default: return static_cast<const float*>(data)[i];
  }
}

// Numbers as a kernel is to take them.
struct Numbers {
  DType type;
  const void* data;
  int64_t stride;
};

// sums (m, rows) = x · weightᵀ
static __global__ void reference(Numbers x, Numbers weight, int rows, int k, double* sums) {
  const int row = blockIdx.x * kCheckThreads + threadIdx.x, token = blockIdx.y;
  if (row >= rows) return;
  double sum = 0;
  for (int i = 0; i < k; ++i)
    sum += value_at(weight.type, weight.data, row * weight.stride + i) * value_at(x.type, x.data, token * x.stride + i);
  sums[int64_t{token} * rows + row] = sum;
}

__device__ inline double activate(ActivationKind kind, double x) {
  switch (kind) {
    case ActivationKind::silu: return x / (1 + exp(-x));
    case ActivationKind::gelu: return 0.5 * x * (1 + erf(x * 0.70710678118654752440));
    case ActivationKind::gelu_tanh: return 0.5 * x * (1 + tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x)));
    default: return x > 0 ? x : 0;
  }
}

struct Verdict {
  float worst;     // |value - true| / (1 + |true|); a NaN counts as 10^9
  int strays;      // bytes written beside the result
  double squares;  // of the differences, and of what is true
  double true_squares;
};

// `a.residual` holds what it held before the call.
static __global__ void compare(LinearArgs a, const double* sums, int slabs, Verdict* verdict) {
  const int column = blockIdx.x * kCheckThreads + threadIdx.x, token = blockIdx.y;
  if (column >= a.n) return;
  auto full = [&](int row, int rows) {
    return sums[int64_t{token} * rows + row] + (a.bias && !slabs ? value_at(a.type, a.bias, row) : 0);
  };
  double right = a.gated ? activate(a.activation, full(column, 2 * a.n)) * full(a.n + column, 2 * a.n) : full(column, a.n);
  double value = 0;
  if (slabs) {
    for (int s = 0; s < slabs; ++s) value += a.slabs[(int64_t{s} * a.m + token) * a.n + column];
  } else {
    if (a.residual) right += value_at(a.type, a.residual, token * a.residual_stride + column);
    value = value_at(a.out_type, a.out, token * a.out_stride + column);
  }
  const double error = abs(value - right) / (1 + abs(right));
  atomicMax(reinterpret_cast<int*>(&verdict->worst), __float_as_int(error == error ? static_cast<float>(error) : 1e9f));
  atomicAdd(&verdict->squares, (value - right) * (value - right));
  atomicAdd(&verdict->true_squares, right * right);
}

// Bytes that are not poison, outside of `rows` rows of `width` bytes.
static __global__ void stray(const uint8_t* data, int64_t bytes, int64_t first, int64_t stride, int rows, int64_t width,
                             int* count) {
  for (int64_t i = blockIdx.x * int64_t{kCheckThreads} + threadIdx.x; i < bytes; i += int64_t{gridDim.x} * kCheckThreads) {
    const int64_t at = i - first;
    const bool inside = at >= 0 && at / stride < rows && at % stride < width;
    if (!inside && data[i] != kPoison) atomicAdd(count, 1);
  }
}

struct Case {
  DType type;
  int m, n, k;
  bool bias = false, gated = false, out_f32 = false;
  enum { none, apart, in_place } residual = none;
  ActivationKind activation = ActivationKind::silu;
  bool slabs = false;
  int x_shift = 0, x_pad = 0, out_shift = 0, out_pad = 0;  // elements

  std::string name() const {
    return concat(name_of(type), " m ", m, " n ", n, " k ", k, bias ? ", bias" : "", out_f32 ? ", f32" : "",
                  residual == apart      ? ", residual"
                  : residual == in_place ? ", residual in place"
                                         : "",
                  gated ? concat(", gated ", static_cast<int>(activation)) : "", slabs ? ", slabs" : "", ", x ", x_shift, "+",
                  x_pad, ", out ", out_shift, "+", out_pad);
  }
};

struct Limits {
  float worst;             // of an element, as in Verdict
  double relative = 1e30;  // of all together: the root of the mean square, to that of what is true
};

// Half a unit in the last place; cuBLASLt may round before it adds, a gated linear in three steps rounds three times.
inline Limits limits_of_rounding(const Case& c, bool own) {
  if (c.slabs || c.out_f32 || c.type == DType::f32) return {1e-4f};
  const bool adds = c.bias || c.residual != Case::none;
  return {(c.type == DType::bf16 ? 4e-3f : 6e-4f) * (own ? 1.f : c.gated ? 3.5f : adds ? 2.f : 1.f)};
}

// One of our kernels in one configuration.
struct Configured {
  int split;
  std::function<void(const LinearArgs&)> run;
  std::string name;
};

class Checker {
 public:
  explicit Checker(cudaStream_t stream) : queue_{stream, false} {}

  // Gives the call another weight, and tells the numbers that it stands for.
  std::function<Numbers(const Case&, uint32_t seed, LinearArgs* call)> weights;
  std::string about;  // the weights, for messages
  // What the kernel that takes the call makes of the tokens, if not what they are.
  std::function<Numbers(const LinearArgs& call)> tokens;
  float outlier = 1;  // how much larger some columns of tokens are than the rest
  // `own`: in a configuration that the check gives.
  std::function<Limits(const Case&, bool own)> limits = limits_of_rounding;

  void check(const Case& c, const cuda::StreamConfig& config) {
    check(c, Configured{config.split, [&](const LinearArgs& args) { streams_.run(queue_, args, config); },
                        concat("rows ", config.tile.rows, ", split ", config.split, ", ctas ", config.ctas, ", stages ",
                               config.stages, ", window ", config.window)});
  }
  void check(const Case& c, const cuda::TileConfig& config) {
    const auto run = [&](LinearArgs args) {
      if (args.layout.form == cuda::WeightForm::fp8) args = cuda::linear_quantize(queue_, args);
      tiles_.run(queue_, args, config);
    };
    check(c, Configured{config.split, run,
                        concat("tile ", 64 * config.tile.groups, " x ", config.tile.rows, ", shared ",
                               config.share_weights ? "weights" : "tokens", ", split ", config.split)});
  }
  // Without one whatever Linears takes. Returns the relative error.
  double check(const Case& c, const std::optional<Configured>& config = {}) {
    const int rows = c.gated ? 2 * c.n : c.n;
    const int64_t x_stride = c.k + c.x_pad, out_stride = c.n + c.out_pad, residual_stride = c.n + 24;
    const DType out_type = c.out_f32 ? DType::f32 : c.type;
    const int64_t in = size_of(c.type), out = size_of(out_type);
    const float scale = 1.7f / std::sqrt(static_cast<float>(c.k));
    const uint32_t seed = ++cases_;
    fill(c.type, weight_.at(), int64_t{rows} * c.k, scale, seed);
    fill(c.type, x_.at(), c.m * x_stride + c.x_shift, 1.7f, seed + 1, outlier);
    fill(c.type, bias_.at(), rows, 1.f, seed + 2);
    fill(c.type, residual_.at(), c.m * residual_stride, 1.f, seed + 3);
    LinearArgs args{.weight = weight_.at(),
                    .x = x_.at(c.x_shift * in),
                    .x_stride = x_stride,
                    .m = c.m,
                    .n = c.n,
                    .k = c.k,
                    .type = c.type,
                    .out = out_.at(kMargin + c.out_shift * out),
                    .out_stride = out_stride,
                    .out_type = out_type,
                    .bias = c.bias ? bias_.at() : nullptr,
                    .gated = c.gated,
                    .activation = c.activation,
                    .scratch = scratch_.at(),
                    .widened = widened_.at()};
    LinearArgs call = args;
    Numbers weight{c.type, args.weight, c.k}, x{c.type, args.x, x_stride};
    if (weights) weight = weights(c, seed, &call);
    int slabs = 0;
    if (c.slabs) {
      slabs = config ? config->split : cuda::slabs_of(call);
      if (slabs < 2) return 0;
      args.slabs = call.slabs = static_cast<float*>(out_.at(kMargin));
    }
    const int64_t used = c.slabs ? int64_t{slabs} * c.m * c.n * 4 : c.m * out_stride * out + c.out_shift * out;
    const int64_t held = used + 2 * kMargin;
    MAGA_CHECK(held <= static_cast<int64_t>(out_.bytes()) && int64_t{rows} * c.k * in <= static_cast<int64_t>(weight_.bytes()) &&
                   int64_t{rows} * c.m * 8 <= static_cast<int64_t>(sums_.bytes()),
               c.name());
    MAGA_CUDA(cudaMemsetAsync(out_.at(), kPoison, held, queue_.stream));
    MAGA_CUDA(cudaMemsetAsync(widened_.at(), kPoison, 1 << 22, queue_.stream));
    MAGA_CUDA(cudaMemsetAsync(verdict_.at(), 0, sizeof(Verdict), queue_.stream));
    if (c.residual != Case::none) {
      args.residual = call.residual = residual_.at();
      args.residual_stride = call.residual_stride = residual_stride;
    }
    if (c.residual == Case::in_place) {
      MAGA_CUDA(cudaMemcpy2DAsync(args.out, out_stride * out, args.residual, residual_stride * in, c.n * in, c.m,
                                  cudaMemcpyDeviceToDevice, queue_.stream));
      call.residual = args.out;
      call.residual_stride = out_stride;
    }
    if (config)
      config->run(call);
    else
      linears_.run(queue_, call);
    if (tokens) x = tokens(call);
    auto* const sums = static_cast<double*>(sums_.at());
    auto* const verdict = static_cast<Verdict*>(verdict_.at());
    const auto blocks = [&](int count) { return dim3((count + kCheckThreads - 1) / kCheckThreads, c.m); };
    reference<<<blocks(rows), kCheckThreads, 0, queue_.stream>>>(x, weight, rows, c.k, sums);
    compare<<<blocks(c.n), kCheckThreads, 0, queue_.stream>>>(args, sums, slabs, verdict);
    if (c.slabs)
      stray<<<256, kCheckThreads, 0, queue_.stream>>>(static_cast<uint8_t*>(out_.at()), held, kMargin, used, 1, used,
                                                      &verdict->strays);
    else
      stray<<<256, kCheckThreads, 0, queue_.stream>>>(static_cast<uint8_t*>(out_.at()), held, kMargin + c.out_shift * out,
                                                      out_stride * out, c.m, c.n * out, &verdict->strays);
    MAGA_CUDA(cudaGetLastError());
    Verdict found;
    MAGA_CUDA(cudaMemcpyAsync(&found, verdict, sizeof found, cudaMemcpyDeviceToHost, queue_.stream));
    MAGA_CUDA(cudaStreamSynchronize(queue_.stream));
    const Limits limit = limits(c, config.has_value());
    const double relative = std::sqrt(found.squares / found.true_squares);
    const float share = std::max(found.worst / limit.worst, static_cast<float>(relative / limit.relative));
    nearest_ = std::max(nearest_, share);
    if (share <= 1 && found.strays == 0) return relative;
    if (++failures_ <= 40) {
      std::printf("WRONG %s%s: error %g, limit %g, relative %g, %d stray bytes", c.name().c_str(), about.c_str(), found.worst,
                  limit.worst, relative, found.strays);
      if (config) std::printf(" (%s)", config->name.c_str());
      std::printf("\n");
    }
    return relative;
  }

  // Runs `layers` linears that depend on one another, with overlap and without: the results must agree bit for bit.
  void check_overlap(DType type, int m, int width, int inner, int layers) {
    const int64_t in = size_of(type);
    ++cases_;
    fill(type, weight_.at(), int64_t{3} * inner * width, 1.f / std::sqrt(static_cast<float>(width)), cases_);
    std::vector<std::vector<char>> results;
    for (const bool overlap : {false, true}) {
      MAGA_CUDA(cudaMemsetAsync(out_.at(), kPoison, 1 << 20, queue_.stream));
      fill(type, x_.at(), int64_t{m} * width, 1.f, 3);
      const cuda::Queue queue{queue_.stream, overlap};
      const Graph graph(queue_.stream, [&] {
        for (int layer = 0; layer < layers; ++layer) {
          linears_.run(queue, {.weight = weight_.at(),
                               .x = x_.at(),
                               .x_stride = width,
                               .m = m,
                               .n = inner,
                               .k = width,
                               .type = type,
                               .out = out_.at(),
                               .out_stride = inner,
                               .out_type = type,
                               .gated = true,
                               .scratch = scratch_.at()});
          linears_.run(queue, {.weight = weight_.at(2 * in * inner * width),
                               .x = out_.at(),
                               .x_stride = inner,
                               .m = m,
                               .n = width,
                               .k = inner,
                               .type = type,
                               .out = x_.at(),
                               .out_stride = width,
                               .out_type = type,
                               .residual = x_.at(),
                               .residual_stride = width,
                               .scratch = scratch_.at()});
        }
      });
      graph.launch(queue_.stream);
      results.emplace_back(m * width * in);
      MAGA_CUDA(cudaMemcpyAsync(results.back().data(), x_.at(), m * width * in, cudaMemcpyDeviceToHost, queue_.stream));
      MAGA_CUDA(cudaStreamSynchronize(queue_.stream));
    }
    if (results[0] == results[1]) return;
    ++failures_;
    std::printf("WRONG %s m %d, %d layers of %d and %d: not the same with overlap\n", name_of(type).data(), m, layers, width,
                inner);
  }

  // Prints the number of cases and failures; returns the failures.
  int report() const {
    std::printf("%d cases, %d failures, the worst error at %.2f of its limit\n", cases_, failures_, nearest_);
    return failures_;
  }
  cudaStream_t stream() const { return queue_.stream; }
  bool tiles_take(const LinearArgs& call) const { return tiles_.takes(call); }

 private:
  static constexpr int64_t kMargin = 4096;  // bytes before and after a result

  cuda::Queue queue_;
  cuda::Linears linears_;
  cuda::Streams streams_;
  cuda::Tiles tiles_;
  DeviceBuffer weight_{64 << 20}, x_{16 << 20}, bias_{1 << 20}, residual_{16 << 20}, out_{64 << 20}, sums_{128 << 20},
      verdict_{sizeof(Verdict)}, scratch_{cuda::linear_scratch_bytes(512, 4096, DType::f32)}, widened_{cuda::kWidenedBytes};
  int cases_ = 0, failures_ = 0;
  float nearest_ = 0;
};

}  // namespace maga::bench
