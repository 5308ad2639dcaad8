// Checks the linears of codes: what their units hold against the values, every kernel and configuration against sums in double
// precision over the same numbers, every epilogue, odd sizes and strides.
#include "cuda_linear_quantized.h"

#include "cuda_linear_checker.cuh"

namespace maga::bench {
namespace {

constexpr int kThreads = 256;

struct Size {
  int n, k;
};

__global__ void make_codes(cuda::AffineRows rows, int bits, uint32_t seed, uint8_t* codes) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < rows.rows * rows.cols; i += int64_t{gridDim.x} * kThreads)
    codes[i] = static_cast<uint8_t>(hash(i, seed) >> (32 - bits));
}

__global__ void make_scales(cuda::AffineRows rows, int bits, cuda::AffineShift shift, uint32_t seed, float* scale, float* offset) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < rows.rows * (rows.cols / rows.group);
       i += int64_t{gridDim.x} * kThreads) {
    const uint32_t h = hash(i, seed);
    const float size = rsqrtf(static_cast<float>(rows.cols)) * static_cast<float>(4 >> bits % 2) / static_cast<float>(1 << bits);
    scale[i] = __half2float(__float2half((h & 1 ? -1.f : 1.f) * size * (0.5f + static_cast<float>(h >> 8) / 16777216.f)));
    if (shift == cuda::AffineShift::zeros) offset[i] = -scale[i] * static_cast<float>((h >> 1) % (1u << bits));
    if (shift == cuda::AffineShift::offsets) offset[i] = size * (static_cast<float>((h >> 1) % 1000) - 500.f) * 0.01f;
  }
}

__global__ void compare_values(cuda::AffineRows rows, int middle, DType type, const void* dense, float* worst) {
  const double half_unit = type == DType::bf16 ? 1. / 256 : 1. / 2048;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < rows.rows * rows.cols; i += int64_t{gridDim.x} * kThreads) {
    const int64_t group = i / rows.cols * (rows.cols / rows.group) + i % rows.cols / rows.group;
    const double scale = rows.scale[group], offset = rows.offset ? rows.offset[group] : 0;
    const double value = scale * (rows.codes[i] - rows.zero) + offset;
    // The number, its scale and its offset are rounded; fp16 is coarse near 0.
    const double shift = offset + scale * (middle - rows.zero);
    const double allowed =
        half_unit * (2 * fabs(value) + (rows.offset ? 3 * fabs(shift) : 0)) + (type == DType::f16 ? 6e-8 : 1e-30);
    const double error = fabs(value_at(type, dense, i) - value) / allowed;
    atomicMax(reinterpret_cast<int*>(worst), __float_as_int(error == error ? static_cast<float>(error) : 1e9f));
  }
}

}  // namespace

std::string CodeForm::name() const {
  return concat(bits, " bits, groups of ", group ? concat(group) : "a row", shift == cuda::AffineShift::zeros ? ", zeros" : "",
                shift == cuda::AffineShift::offsets ? ", offsets" : "");
}

CodedWeight::CodedWeight(int64_t most_elements)
    : codes_(most_elements),
      scale_(most_elements / 2 + 4096),
      offset_(most_elements / 2 + 4096),
      units_(2 * most_elements + (4 << 20)),
      verdict_(4) {}

void CodedWeight::make(cudaStream_t stream, const CodeForm& form, DType type, int64_t rows, int64_t cols, uint32_t seed) {
  const int64_t group = form.group ? form.group : cols;
  const bool shifts = form.shift != cuda::AffineShift::none;
  rows_ = {};
  rows_.codes = static_cast<uint8_t*>(codes_.at()), rows_.scale = static_cast<float*>(scale_.at());
  if (shifts) rows_.offset = static_cast<float*>(offset_.at());
  rows_.rows = rows, rows_.cols = cols, rows_.group = group;
  rows_.zero = shifts ? 0 : 1 << (form.bits - 1);
  MAGA_CHECK(rows * cols <= static_cast<int64_t>(codes_.bytes()), rows, " x ", cols);
  make_codes<<<1024, kThreads, 0, stream>>>(rows_, form.bits, seed, static_cast<uint8_t*>(codes_.at()));
  make_scales<<<1024, kThreads, 0, stream>>>(rows_, form.bits, form.shift, seed + 1, static_cast<float*>(scale_.at()),
                                             static_cast<float*>(offset_.at()));
  MAGA_CUDA(cudaGetLastError());
  // The layout is found as at load, from the host's copy of the scales.
  const int64_t count = rows * (cols / group);
  std::vector<float> scale(count), offset(shifts ? count : 0);
  MAGA_CUDA(cudaMemcpyAsync(scale.data(), scale_.at(), count * 4, cudaMemcpyDeviceToHost, stream));
  if (shifts) MAGA_CUDA(cudaMemcpyAsync(offset.data(), offset_.at(), count * 4, cudaMemcpyDeviceToHost, stream));
  MAGA_CUDA(cudaStreamSynchronize(stream));
  const auto tensor = [&](const std::vector<float>& from) {
    Tensor tensor;
    if (from.empty()) return tensor;
    tensor.data = reinterpret_cast<const std::byte*>(from.data());
    tensor.dtype = DType::f32;
    tensor.shape = {rows, cols / group};
    return tensor;
  };
  Affine weight;
  weight.codes.dtype = DType::u8;
  weight.codes.shape = {rows, cols};
  weight.bits = form.bits, weight.group = group, weight.zero = rows_.zero;
  weight.scale = tensor(scale), weight.offset = tensor(offset);
  std::string why;
  layout_ = cuda::affine_layout(weight, type, &why);
  MAGA_CHECK(layout_.bits > 0, form.name(), ": ", why);
  MAGA_CHECK(cuda::affine_bytes(layout_, rows, cols) <= static_cast<int64_t>(units_.bytes()), rows, " x ", cols);
  cuda::affine_pack(stream, type, layout_, rows_, units_.at());
}

float CodedWeight::error(cudaStream_t stream, const void* dense, DType type) const {
  MAGA_CUDA(cudaMemsetAsync(verdict_.at(), 0, 4, stream));
  compare_values<<<1024, kThreads, 0, stream>>>(rows_, 1 << (layout_.bits - 1), type, dense, static_cast<float*>(verdict_.at()));
  MAGA_CUDA(cudaGetLastError());
  float worst = 0;
  MAGA_CUDA(cudaMemcpyAsync(&worst, verdict_.at(), 4, cudaMemcpyDeviceToHost, stream));
  MAGA_CUDA(cudaStreamSynchronize(stream));
  return worst;
}

int check_quantized(cudaStream_t stream, bool small) {
  using Shift = cuda::AffineShift;
  Checker checker(stream);
  CodedWeight coded(16 << 20);
  const DeviceBuffer dense(64 << 20);
  cuda::Affines affines;
  const std::vector<Size> sizes = {Size{960, 576}, Size{7, 128}, Size{129, 1024}, Size{1032, 2048}};
  const std::vector<ActivationKind> kinds = {ActivationKind::silu, ActivationKind::gelu, ActivationKind::gelu_tanh,
                                             ActivationKind::relu};
  const std::vector<int> many = {1, 8, 13, 32, 47, 64, 100, 128, 200, 300}, several = {1, 5, 16, 33, 64, 65, 130, 192, 300};
  int wrong = 0, forms = 0;
  CodeForm form;
  // A kernel may round weights otherwise than what it is compared with.
  checker.limits = [](const Case& c, bool own) {
    const float rounding = c.type == DType::bf16 ? 1.3e-2f : 1.7e-3f;
    return Limits{std::max(limits_of_rounding(c, own).worst, rounding * (c.gated ? 3.f : 1.f))};
  };
  checker.weights = [&](const Case& c, uint32_t seed, cuda::LinearArgs* call) {
    const int64_t rows = c.gated ? 2 * c.n : c.n;
    MAGA_CHECK(rows * c.k * size_of(c.type) <= static_cast<int64_t>(dense.bytes()), c.name());
    coded.make(stream, form, c.type, rows, c.k, seed);
    // Poisoned, so that what is not unpacked shows.
    MAGA_CUDA(cudaMemsetAsync(dense.at(), kPoison, rows * c.k * size_of(c.type), stream));
    cuda::affine_unpack({stream, false}, c.type, coded.layout().affine, coded.units(), 0, rows, c.k, dense.at());
    if (const float error = coded.error(stream, dense.at(), c.type); error > 1 && ++wrong <= 20)
      std::printf("WRONG values of %s, %s: %g of what rounding explains\n", form.name().c_str(), c.name().c_str(), error);
    call->weight = coded.units();
    call->layout = coded.layout();
    return Numbers{c.type, dense.at(), c.k};
  };
  auto configs_of = [&](int m, int rows, int k, bool may_split, int sms) {
    // As the kernels are compiled for; the shift does not matter otherwise.
    cuda::AffineShape shape;
    shape.m = m, shape.rows = rows, shape.k = k, shape.may_split = may_split, shape.sms = sms;
    shape.layout.bits = form.bits <= 4 ? 4 : 8;
    const int64_t group = form.group ? form.group : 128;
    for (shape.layout.sets = 1; group % (128 / shape.layout.sets) != 0;) shape.layout.sets *= 2;
    shape.layout.shift = form.bits <= 4 || form.shift == Shift::offsets ? form.shift : Shift::none;
    return cuda::affine_configs(shape);
  };
  auto configured = [&](const cuda::AffineConfig& config) {
    return Configured{config.split, [&, config](const cuda::LinearArgs& args) { affines.run({stream, false}, args, config); },
                      concat("tile ", config.tile.tokens, " x ", config.tile.rows(), " of ", config.tile.groups, ", split ",
                             config.split, ", ctas ", config.ctas, ", stages ", config.stages, ", window ", config.window)};
  };
  const std::vector<CodeForm> all_forms = {
      CodeForm{4, 128, Shift::none},  CodeForm{4, 32, Shift::none},    CodeForm{4, 64, Shift::zeros},
      CodeForm{4, 128, Shift::zeros}, CodeForm{4, 32, Shift::offsets}, CodeForm{4, 96, Shift::none},
      CodeForm{4, 0, Shift::none},    CodeForm{3, 32, Shift::none},    CodeForm{3, 32, Shift::zeros},
      CodeForm{2, 64, Shift::none},   CodeForm{8, 0, Shift::none},     CodeForm{8, 128, Shift::none},
      CodeForm{8, 32, Shift::none},   CodeForm{8, 64, Shift::offsets}, CodeForm{6, 32, Shift::none},
      CodeForm{5, 32, Shift::zeros}};
  for (const CodeForm& each : all_forms) {
    form = each;
    checker.about = concat(", ", form.name());
    ++forms;
    const bool main_form = forms == 1 || form.bits == 8 || form.shift == Shift::offsets;
    for (const DType type : {DType::bf16, DType::f16}) {
      // Every configuration, on sizes that leave tiles, steps and tokens part empty.
      for (const int m : many) {
        if (small && m != 13 && m != 100) continue;
        if (!main_form && m != 13 && m != 100) continue;
        for (const bool slabs : {false, true}) {
          if (slabs && m > 256) continue;
          const Case plain{.type = type, .m = m, .n = 600, .k = form.group ? 1152 : 1096, .bias = !slabs, .slabs = slabs};
          for (const cuda::AffineConfig& config : configs_of(m, plain.n, plain.k, slabs, 5))
            if (slabs == (config.split > 1)) checker.check(plain, configured(config));
        }
        const Case gated{.type = type, .m = m, .n = 344, .k = 640, .bias = true, .gated = true};
        for (const cuda::AffineConfig& config : configs_of(m, 2 * gated.n, gated.k, false, 3))
          checker.check(gated, configured(config));
      }
      // Every epilogue and alignment, through Linears.
      for (const Size& size : sizes)
        for (const int m : several) {
          if (small && (m != 5 && m != 65)) continue;
          if (!main_form && m != 5 && m != 65) continue;
          const int n = size.n, k = size.k;
          if (form.group && k % form.group) continue;
          const Case plain{.type = type, .m = m, .n = n, .k = k};
          auto with = [&](auto&& change) {
            Case c = plain;
            change(c);
            checker.check(c);
          };
          checker.check(plain);
          with([](Case& c) { c.bias = true; });
          with([](Case& c) { c.residual = Case::in_place, c.bias = true; });
          with([](Case& c) { c.out_f32 = true, c.out_pad = 3; });
          with([](Case& c) { c.out_f32 = true, c.bias = true, c.residual = Case::apart; });
          with([](Case& c) { c.slabs = true; });
          with([](Case& c) { c.x_shift = 16, c.x_pad = 64, c.out_shift = 8, c.out_pad = 8; });
          with([](Case& c) { c.x_shift = 1, c.x_pad = 3, c.out_shift = 3, c.out_pad = 5, c.residual = Case::in_place; });
          for (const ActivationKind kind : kinds)
            with([&](Case& c) {
              c.gated = true, c.activation = kind, c.bias = kind != ActivationKind::relu, c.out_pad = n % 2 * 3;
            });
        }
    }
  }
  std::printf("%d forms, %d weights wrong; ", forms, wrong);
  return checker.report() + wrong;
}

}  // namespace maga::bench
