// Checks the CUDA linears of e4m3 weights, or times them on the matrices of Llama-3-8B:
//   cuda_linear_fp8 check [small | bf16]  every kernel and epilogue against sums in double of the same rounded tokens and codes
//   cuda_linear_fp8 error             how far rounding the tokens takes a result, against exact tokens
//   cuda_linear_fp8 time              through Linears, beside cuBLASLt on bf16 weights
//   cuda_linear_fp8 sweep             every configuration, against the one that is chosen
// --libraries FOLDER: where to look for cuBLASLt first.
//
// Times are replays of a CUDA graph over at least 0.5 GB of distinct weights, kernels overlapping as they do in a step; linears
// that leave partial sums to the next kernel are timed so, without it. Shares are of 4.51 TB/s, what an H200 reads at.
#include <cuda_fp8.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>

#include "backends/cuda/cublaslt.h"
#include "backends/cuda/linear_gemm.h"
#include "backends/cuda/linear_quantize.h"
#include "backends/cuda/linear_stream.h"
#include "backends/cuda/linear_tiles.h"
#include "cuda_linear.h"

namespace maga::bench {
namespace {

using cuda::LinearArgs;

constexpr int kThreads = 256;
constexpr uint8_t kPoison = 0xff;  // NaN in all three types
constexpr int64_t kMargin = 4096;  // bytes before and after a result

__device__ double value_at(DType type, const void* data, int64_t i) {
  switch (type) {
    case DType::f16: return static_cast<float>(static_cast<const __half*>(data)[i]);
    case DType::bf16: return static_cast<float>(static_cast<const __nv_bfloat16*>(data)[i]);
    default: return static_cast<const float*>(data)[i];
  }
}

__device__ float uniform(int64_t i, uint32_t seed) { return static_cast<float>(hash(i, seed) >> 8) * (2.f / 16777216.f) - 1.f; }

__global__ void fill_kernel(DType type, void* data, int64_t count, float scale, uint32_t seed) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads) {
    // Some columns are far larger than the rest, as in real models.
    const float value = uniform(i, seed) * scale * (i % 97 == 5 ? 20.f : 1.f);
    if (type == DType::f16)
      static_cast<__half*>(data)[i] = __float2half(value);
    else if (type == DType::bf16)
      static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16(value);
    else
      static_cast<float*>(data)[i] = value;
  }
}

// Codes of a normal distribution whose deviation is `size` times 448; a scale each row, so that values deviate by about
// `deviation`.
__global__ void fill_codes(uint8_t* codes, int64_t rows, int64_t columns, float size, float deviation, uint32_t seed) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < rows * columns; i += int64_t{gridDim.x} * kThreads) {
    const float sum = uniform(i, seed) + uniform(i, seed + 101) + uniform(i, seed + 202);  // deviates by 1
    codes[i] = __nv_cvt_float_to_fp8(sum * size * 448, __NV_SATFINITE, __NV_E4M3);
  }
  auto* const scales = reinterpret_cast<float*>(codes + rows * columns);
  for (int64_t r = blockIdx.x * int64_t{kThreads} + threadIdx.x; r < rows; r += int64_t{gridDim.x} * kThreads)
    scales[r] = deviation / (size * 448) * (1 + 0.5f * uniform(r, seed + 303));
}

__device__ double code_value(uint8_t code) { return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3))); }

// tokens (m, k): as the kernels round them, by as many columns as there are threads, or as they are.
__global__ void round_tokens(LinearArgs a, bool exact, double* tokens) {
  const int first = blockIdx.x * blockDim.x, token = blockIdx.y, column = first + threadIdx.x;
  __shared__ float values[cuda::kTileScaleColumns];
  values[threadIdx.x] = column < a.k ? static_cast<float>(value_at(a.type, a.x, token * a.x_stride + column)) : 0.f;
  __syncthreads();
  float most = 1e-30f;
  for (int i = 0; i < blockDim.x; ++i) most = fmaxf(most, fabsf(values[i]));
  const float inverse = __fdividef(448.f, most), scale = most * (1 / 448.f);
  const uint8_t code = __nv_cvt_float_to_fp8(values[threadIdx.x] * inverse, __NV_SATFINITE, __NV_E4M3);
  if (column < a.k) tokens[int64_t{token} * a.k + column] = exact ? double{values[threadIdx.x]} : code_value(code) * double{scale};
}

// sums (m, rows)
__global__ void reference(LinearArgs a, int rows, const double* tokens, double* sums) {
  const int row = blockIdx.x * kThreads + threadIdx.x, token = blockIdx.y;
  if (row >= rows) return;
  const auto* codes = static_cast<const uint8_t*>(a.weight) + int64_t{row} * a.k;
  double sum = 0;
  for (int i = 0; i < a.k; ++i) sum += code_value(codes[i]) * tokens[int64_t{token} * a.k + i];
  const auto* scales = reinterpret_cast<const float*>(static_cast<const uint8_t*>(a.weight) + int64_t{rows} * a.k);
  sums[int64_t{token} * rows + row] = sum * scales[row];
}

__device__ double activate(ActivationKind kind, double x) {
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

__global__ void compare(LinearArgs a, const double* sums, int slabs, Verdict* verdict) {
  const int column = blockIdx.x * kThreads + threadIdx.x, token = blockIdx.y;
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

__global__ void stray(const uint8_t* data, int64_t bytes, int64_t first, int64_t stride, int rows, int64_t width, int* count) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < bytes; i += int64_t{gridDim.x} * kThreads) {
    const int64_t at = i - first;
    const bool inside = at >= 0 && at / stride < rows && at % stride < width;
    if (!inside && data[i] != kPoison) atomicAdd(count, 1);
  }
}

struct Case {
  DType type;
  int m, n, k;
  bool bias = false, gated = false, out_f32 = false, slabs = false, residual = false;
  ActivationKind activation = ActivationKind::silu;
  int x_shift = 0, x_pad = 0, out_shift = 0, out_pad = 0;  // elements

  std::string name() const {
    return concat(name_of(type), " m ", m, " n ", n, " k ", k, bias ? ", bias" : "", out_f32 ? ", f32" : "",
                  residual ? ", residual" : "", gated ? concat(", gated ", static_cast<int>(activation)) : "",
                  slabs ? ", slabs" : "", ", x ", x_shift, "+", x_pad, ", out ", out_shift, "+", out_pad);
  }
  // Of an element: half a unit in the last place, and what the tensor cores drop of sums that are far larger than the result.
  float limit() const { return (slabs || out_f32 ? 0.f : type == DType::bf16 ? 4e-3f : 6e-4f) + (gated ? 1e-1f : 1e-2f); }
  // Of all elements together, as root mean square.
  double relative_limit() const { return slabs || out_f32 ? 6e-4 : type == DType::bf16 ? 2.5e-3 : 1e-3; }
};

// A kernel in one configuration.
struct Configured {
  int split;
  std::function<void(const LinearArgs&)> run;
  std::string name;
};

class Checker {
 public:
  explicit Checker(cudaStream_t stream) : queue_{stream, false} {}

  void check(const Case& c, const cuda::StreamConfig& config) {
    check(c, Configured{config.split, [&](const LinearArgs& args) { streams_.run(queue_, args, config); },
                        concat("rows ", config.tile.rows, ", split ", config.split, ", ctas ", config.ctas, ", stages ",
                               config.stages, ", window ", config.window)});
  }
  void check(const Case& c, const cuda::TileConfig& config) {
    check(c,
          Configured{config.split,
                     [&](const LinearArgs& args) { tiles_.run(queue_, cuda::linear_quantize(queue_, args, args.widened), config); },
                     concat("tile ", 64 * config.tile.groups, " x ", config.tile.rows, ", shared ",
                            config.share_weights ? "weights" : "tokens", ", split ", config.split)});
  }
  // Without one whatever Linears takes. `exact`: against tokens that are not rounded; returns the relative error.
  double check(const Case& c, const Configured& config = {}, bool exact = false) {
    const int rows = c.gated ? 2 * c.n : c.n;
    const int64_t x_stride = c.k + c.x_pad, out_stride = c.n + c.out_pad, residual_stride = c.n + 24;
    const DType out_type = c.out_f32 ? DType::f32 : c.type;
    const int64_t in = size_of(c.type), out = size_of(out_type);
    const uint32_t seed = ++cases_;
    fill_codes<<<512, kThreads, 0, queue_.stream>>>(static_cast<uint8_t*>(weight_.at()), rows, c.k, 0.2f,
                                                    1.f / std::sqrt(static_cast<float>(c.k)), seed);
    fill(c.type, x_.at(), c.m * x_stride + c.x_shift, 1.7f, seed + 1);
    fill(c.type, bias_.at(), rows, 1.f, seed + 2);
    fill(c.type, residual_.at(), c.m * residual_stride, 1.f, seed + 3);
    MAGA_CUDA(cudaDeviceSynchronize());
    LinearArgs args{.weight = weight_.at(),
                    .layout = {.form = cuda::WeightForm::fp8},
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
    int slabs = 0;
    if (c.slabs) {
      slabs = config.run ? config.split : cuda::slabs_of(args);
      if (slabs < 2) return 0;
      args.slabs = static_cast<float*>(out_.at(kMargin));
    }
    const int64_t used = c.slabs ? int64_t{slabs} * c.m * c.n * 4 : c.m * out_stride * out + c.out_shift * out;
    const int64_t held = used + 2 * kMargin;
    MAGA_CHECK(held <= static_cast<int64_t>(out_.bytes()) && int64_t{rows} * (c.k + 4) <= static_cast<int64_t>(weight_.bytes()) &&
                   int64_t{rows} * c.m * 8 <= static_cast<int64_t>(sums_.bytes()) &&
                   int64_t{c.m} * c.k * 8 <= static_cast<int64_t>(tokens_.bytes()),
               c.name());
    MAGA_CUDA(cudaMemsetAsync(out_.at(), kPoison, held, queue_.stream));
    MAGA_CUDA(cudaMemsetAsync(widened_.at(), kPoison, 1 << 22, queue_.stream));
    MAGA_CUDA(cudaMemsetAsync(verdict_.at(), 0, sizeof(Verdict), queue_.stream));
    LinearArgs call = args;
    if (c.residual) {  // in place
      args.residual = residual_.at();
      args.residual_stride = residual_stride;
      MAGA_CUDA(cudaMemcpy2DAsync(args.out, out_stride * out, args.residual, residual_stride * in, c.n * in, c.m,
                                  cudaMemcpyDeviceToDevice, queue_.stream));
      call.residual = args.out;
      call.residual_stride = out_stride;
    }
    if (config.run)
      config.run(call);
    else
      linears_.run(queue_, call);
    auto* const tokens = static_cast<double*>(tokens_.at());
    auto* const sums = static_cast<double*>(sums_.at());
    auto* const verdict = static_cast<Verdict*>(verdict_.at());
    const int columns = tiles_.takes(call) ? cuda::kTileScaleColumns : 128;
    round_tokens<<<dim3((c.k + columns - 1) / columns, c.m), columns, 0, queue_.stream>>>(args, exact, tokens);
    reference<<<dim3((rows + kThreads - 1) / kThreads, c.m), kThreads, 0, queue_.stream>>>(args, rows, tokens, sums);
    compare<<<dim3((c.n + kThreads - 1) / kThreads, c.m), kThreads, 0, queue_.stream>>>(args, sums, slabs, verdict);
    if (c.slabs)
      stray<<<256, kThreads, 0, queue_.stream>>>(static_cast<uint8_t*>(out_.at()), held, kMargin, used, 1, used, &verdict->strays);
    else
      stray<<<256, kThreads, 0, queue_.stream>>>(static_cast<uint8_t*>(out_.at()), held, kMargin + c.out_shift * out,
                                                 out_stride * out, c.m, c.n * out, &verdict->strays);
    MAGA_CUDA(cudaGetLastError());
    Verdict found;
    MAGA_CUDA(cudaMemcpyAsync(&found, verdict, sizeof found, cudaMemcpyDeviceToHost, queue_.stream));
    MAGA_CUDA(cudaStreamSynchronize(queue_.stream));
    const double relative = std::sqrt(found.squares / found.true_squares);
    if (exact) return relative;
    const float share = std::max(found.worst / c.limit(), static_cast<float>(relative / c.relative_limit()));
    nearest_ = std::max(nearest_, share);
    if (share <= 1 && found.strays == 0) return relative;
    if (++failures_ <= 30)
      std::printf("WRONG %s: error %g, limit %g, relative %g, %d stray bytes (%s)\n", c.name().c_str(), found.worst, c.limit(),
                  relative, found.strays, config.name.c_str());
    return relative;
  }

  int report() const {
    std::printf("%d cases, %d failures, the worst error at %.2f of its limit\n", cases_, failures_, nearest_);
    return failures_;
  }

 private:
  cuda::Queue queue_;
  cuda::Linears linears_;
  cuda::Streams streams_;
  cuda::Tiles tiles_;
  DeviceBuffer weight_{64 << 20}, x_{32 << 20}, bias_{1 << 20}, residual_{32 << 20}, out_{64 << 20}, tokens_{64 << 20},
      sums_{128 << 20}, verdict_{sizeof(Verdict)}, scratch_{cuda::linear_scratch_bytes(512, 4096, DType::f32)},
      widened_{cuda::kWidenedBytes};
  int cases_ = 0, failures_ = 0;
  float nearest_ = 0;
};

constexpr ActivationKind kActivations[] = {ActivationKind::silu, ActivationKind::gelu, ActivationKind::gelu_tanh,
                                           ActivationKind::relu};

int check(bool small, const std::vector<DType>& types) {
  cudaStream_t stream;
  MAGA_CUDA(cudaStreamCreate(&stream));
  Checker checker(stream);
  for (const DType type : types) {
    // Through Linears: every epilogue and alignment.
    for (const auto& [n, k] : {std::pair{960, 576}, {16, 48}, {1008, 80}, {2048, 2048}, {272, 1040}})
      for (const int m : {1, 3, 8, 9, 16, 17, 32, 33, 64, 65, 130, 192, 300}) {
        if ((small && (m % 8 == 0 || n > 300)) || (n > 1500 && type != DType::bf16)) continue;
        auto with = [&](auto&& change) {
          Case c{.type = type, .m = m, .n = n, .k = k};
          change(c);
          checker.check(c);
        };
        with([](Case&) {});
        with([](Case& c) { c.bias = c.residual = true; });
        with([](Case& c) { c.out_f32 = true, c.out_pad = 3; });
        with([](Case& c) { c.slabs = true; });
        with([](Case& c) { c.x_shift = 16, c.x_pad = 64, c.out_shift = 8, c.out_pad = 8, c.residual = true; });
        with([](Case& c) { c.x_shift = 1, c.x_pad = 3, c.out_shift = 3, c.out_pad = 5, c.bias = true; });
        for (const ActivationKind kind : kActivations)
          with([&](Case& c) { c.gated = true, c.activation = kind, c.bias = kind != ActivationKind::relu; });
      }
    // Every streaming configuration, on sizes that leave tiles, boxes and tokens part empty.
    for (const int m : {1, 5, 8, 13, 16, 30, 32, 47, 64}) {
      if (small && m % 8 == 0) continue;
      for (const bool slabs : {false, true})
        for (const auto& config :
             cuda::stream_configs({.m = m, .rows = 1200, .k = 1072, .may_split = slabs, .sms = 132, .fp8 = true}))
          if (slabs == (config.split > 1)) checker.check({.type = type, .m = m, .n = 1200, .k = 1072, .slabs = slabs}, config);
      for (const auto& config :
           cuda::stream_configs({.m = m, .rows = 2 * 600, .k = 656, .may_split = false, .sms = 2, .fp8 = true}))
        checker.check({.type = type, .m = m, .n = 600, .k = 656, .gated = true}, config);
    }
    // Every tile, sharing either operand.
    for (const cuda::Tile& tile : cuda::kTiles)
      for (const bool share_weights : {true, false})
        for (const auto [m, n, k] : {std::array{65, 1208, 1040}, {100, 48, 80}, {385, 520, 528}, {520, 4112, 272}}) {
          if (!cuda::tile_has_fp8(tile) || (small && m > 100)) continue;
          auto with = [&](int split, auto&& change) {
            Case c{.type = type, .m = m, .n = n, .k = k};
            change(c);
            checker.check(c, cuda::TileConfig{tile, share_weights, split});
          };
          with(1, [](Case& c) { c.bias = c.residual = true, c.out_pad = 8, c.x_shift = 8, c.x_pad = 16; });
          with(1, [](Case& c) { c.gated = true, c.bias = true, c.out_pad = 8; });
          with(1, [](Case& c) { c.out_f32 = true; });
          if (k >= 256 && m < 500) with(2, [](Case& c) { c.slabs = true; });
        }
  }
  return checker.report();
}

// Relative errors of whole results, against tokens that are not rounded.
void print_errors() {
  cudaStream_t stream;
  MAGA_CUDA(cudaStreamCreate(&stream));
  Checker checker(stream);
  for (const int m : {8, 300}) {
    const Case c{.type = DType::bf16, .m = m, .n = 512, .k = 14336, .out_f32 = true};
    const double sums = checker.check(c), rounding = checker.check(c, {}, true);
    std::printf("m %d, k 14336: relative error of the sums %.2e, of rounding the tokens %.2e\n", m, sums, rounding);
  }
}

struct Matrix {
  const char* name;
  int n, k;  // gated: 2 n rows
  bool gated, split;
  bool f32 = false;
  int64_t rows() const { return gated ? 2 * n : n; }
  int64_t bytes() const { return rows() * (k + 4); }
};
constexpr Matrix kMatrices[] = {{"qkv", 6144, 4096, false, true},
                                {"o", 4096, 4096, false, true},
                                {"gate_up", 14336, 4096, true, false},
                                {"down", 4096, 14336, false, true},
                                {"head", 128256, 4096, false, false, true}};

class Timer {
 public:
  Timer() {
    MAGA_CUDA(cudaStreamCreate(&stream));
    MAGA_CUDA(cudaEventCreate(&begin_));
    MAGA_CUDA(cudaEventCreate(&end_));
    fill(DType::bf16, x_.at(), static_cast<int64_t>(x_.bytes() / 2), 1.7f, 2);
  }
  // Fills the weights for a matrix: as many as there is room for.
  void prepare(const Matrix& matrix, bool fp8) {
    const int64_t bytes = fp8 ? matrix.bytes() : matrix.rows() * matrix.k * 2;
    copies_ = static_cast<int>(std::min<int64_t>(static_cast<int64_t>(weights_.bytes()) / bytes, 60));
    bytes_ = bytes;
    for (int i = 0; i < copies_; ++i) {
      if (fp8)
        fill_codes<<<2048, kThreads>>>(static_cast<uint8_t*>(weights_.at(i * bytes)), matrix.rows(), matrix.k, 0.2f, 0.015f, i + 1);
      else
        fill(DType::bf16, weights_.at(i * bytes), bytes / 2, 0.03f, i + 1);
    }
    MAGA_CUDA(cudaDeviceSynchronize());
  }
  LinearArgs args(const Matrix& matrix, int m, bool fp8) {
    return {.weight = weights_.at(),
            .layout = {.form = fp8 ? cuda::WeightForm::fp8 : cuda::WeightForm::dense},
            .x = x_.at(),
            .x_stride = matrix.k,
            .m = m,
            .n = matrix.n,
            .k = matrix.k,
            .type = DType::bf16,
            .out = out_.at(),
            .out_stride = matrix.n,
            .out_type = matrix.f32 ? DType::f32 : DType::bf16,
            .gated = matrix.gated,
            .scratch = scratch_.at(),
            .widened = widened_.at()};
  }
  // Microseconds a launch: the median of five timings.
  double us(LinearArgs args, const std::function<void(const LinearArgs&)>& run) {
    run(args);  // chooses and loads kernels
    const double flops = 2. * args.m * args.n * args.k * (args.gated ? 2 : 1);
    const int launches = std::clamp(static_cast<int>(1.5e13 / flops), 4, copies_);
    const Graph graph(stream, [&] {
      for (int i = 0; i < launches; ++i) {
        args.weight = weights_.at(i % copies_ * bytes_);
        run(args);
      }
    });
    graph.launch(stream);
    std::vector<float> times;
    for (int i = 0; i < 5; ++i) {
      float ms = 0;
      MAGA_CUDA(cudaEventRecord(begin_, stream));
      graph.launch(stream);
      MAGA_CUDA(cudaEventRecord(end_, stream));
      MAGA_CUDA(cudaStreamSynchronize(stream));
      MAGA_CUDA(cudaEventElapsedTime(&ms, begin_, end_));
      times.push_back(ms);
    }
    std::ranges::sort(times);
    return times[2] * 1e3 / launches;
  }
  float* slabs() { return static_cast<float*>(slabs_.at()); }
  void* widened() { return widened_.at(); }

  cudaStream_t stream = nullptr;
  cuda::Linears linears;
  cuda::Gemms gemms;
  cuda::Streams streams;
  cuda::Tiles tiles;

 private:
  DeviceBuffer weights_{1'100'000'000}, x_{size_t{8192} * 14336 * 2}, out_{size_t{8192} * 28672 * 2}, slabs_{size_t{256} << 20},
      scratch_{cuda::linear_scratch_bytes(8192, 14336, DType::bf16)}, widened_{cuda::kWidenedBytes};
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  int copies_ = 0;
  int64_t bytes_ = 0;
};

constexpr double kBytesPerUs = 4.51e6;
constexpr int kTokens[] = {1, 8, 16, 32, 64, 128, 256, 1024, 8192};

void time_linears(Timer& timer) {
  const cuda::Queue queue{timer.stream, true};
  std::printf("%-8s %5s %9s %7s %8s %9s %9s\n", "", "m", "us", "share", "TFLOP/s", "rounding", "cuBLASLt bf16");
  for (const Matrix& matrix : kMatrices) {
    double own[std::size(kTokens)], rounding[std::size(kTokens)] = {};
    timer.prepare(matrix, true);
    const size_t count = matrix.f32 ? 7 : std::size(kTokens);  // logits are of sequences, not of prompts
    for (size_t i = 0; i < count; ++i) {
      LinearArgs args = timer.args(matrix, kTokens[i], true);
      if (matrix.split && cuda::slabs_of(args) > 0) args.slabs = timer.slabs();
      own[i] = timer.us(args, [&](const LinearArgs& a) { timer.linears.run(queue, a); });
      if (kTokens[i] > 64) rounding[i] = timer.us(args, [&](const LinearArgs& a) { cuda::linear_quantize(queue, a, a.widened); });
    }
    timer.prepare(matrix, false);
    for (size_t i = 0; i < count; ++i) {
      LinearArgs args = timer.args(matrix, kTokens[i], false);
      if (args.gated) args.gated = false, args.n *= 2, args.out_stride = args.n;  // without the activation
      const double us = timer.us(args, [&](const LinearArgs& a) { timer.gemms.run({timer.stream, false}, a, a.scratch); });
      std::printf("%-8s %5d %9.2f %7.3f %8.1f %9.2f %9.2f  x%.2f\n", matrix.name, kTokens[i], own[i],
                  static_cast<double>(matrix.bytes()) / kBytesPerUs / own[i],
                  2. * kTokens[i] * static_cast<double>(matrix.rows() * matrix.k) / own[i] / 1e6, rounding[i], us, us / own[i]);
    }
  }
}

void sweep(Timer& timer) {
  const cuda::Queue queue{timer.stream, true};
  for (const Matrix& matrix : kMatrices) {
    timer.prepare(matrix, true);
    for (const int m : kTokens) {
      if (matrix.f32 && m > 256) continue;
      LinearArgs args = timer.args(matrix, m, true);
      if (matrix.split) args.slabs = timer.slabs();
      std::vector<std::pair<double, std::string>> times;  // the chosen one first
      if (m <= 64) {
        std::vector<cuda::StreamConfig> configs = {cuda::choose_stream(timer.streams.shape_of(args))};
        for (const cuda::StreamConfig& config : cuda::stream_configs(timer.streams.shape_of(args))) configs.push_back(config);
        for (const cuda::StreamConfig& c : configs)
          times.emplace_back(timer.us(args, [&](const LinearArgs& a) { timer.streams.run(queue, a, c); }),
                             concat(c.tile.rows, " rows, split ", c.split, ", ", c.ctas * c.split, " CTAs, ", c.stages,
                                    " stages, window ", c.window));
      } else {
        cuda::TileShape shape = timer.tiles.shape_of(args);
        shape.may_split = matrix.split;
        const LinearArgs rounded = cuda::linear_quantize(queue, args, timer.widened());
        for (const cuda::TileConfig& c : cuda::tile_configs(shape)) {
          LinearArgs call = rounded;
          if (c.split == 1) call.slabs = nullptr;
          times.emplace_back(timer.us(call, [&](const LinearArgs& a) { timer.tiles.run(queue, a, c); }),
                             concat(64 * c.tile.groups, " x ", c.tile.rows, c.share_weights ? ", weights" : ", tokens",
                                    " shared, split ", c.split));
        }
      }
      std::printf("%s m %d: chosen %.2f (%s);", matrix.name, m, times[0].first, times[0].second.c_str());
      std::ranges::sort(times);
      for (size_t i = 0; i < std::min<size_t>(times.size(), 4); ++i)
        std::printf(" %.2f (%s)", times[i].first, times[i].second.c_str());
      std::printf("\n");
    }
  }
}

int run(int count, char** words) {
  std::vector<std::string> rest;
  for (int i = 1; i < count; ++i) {
    if (std::strcmp(words[i], "--libraries") == 0 && i + 1 < count)
      cuda::lt::add_library_folder(words[++i]);
    else
      rest.push_back(words[i]);
  }
  const std::string mode = rest.empty() ? "" : rest[0], more = rest.size() > 1 ? rest[1] : "";
  if (mode == "check" && more == "bf16") return check(false, {DType::bf16}) ? 1 : 0;
  if (mode == "check" && (more.empty() || more == "small")) return check(more == "small", {DType::bf16, DType::f16}) ? 1 : 0;
  if (mode == "error" && more.empty()) return print_errors(), 0;
  if ((mode == "time" || mode == "sweep") && more.empty()) {
    Timer timer;
    mode == "time" ? time_linears(timer) : sweep(timer);
    return 0;
  }
  std::fprintf(stderr, "usage: cuda_linear_fp8 check [small | bf16] | error | time | sweep  [--libraries FOLDER]\n");
  return 2;
}

}  // namespace

void fill(DType type, void* data, int64_t count, float scale, uint32_t seed) {
  fill_kernel<<<2048, kThreads>>>(type, data, count, scale, seed);
  MAGA_CUDA(cudaGetLastError());
}

}  // namespace maga::bench

int main(int count, char** words) {
  try {
    return maga::bench::run(count, words);
  } catch (const maga::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
