// Checks the linears of codes: what their units hold against the values, every kernel and configuration against sums in double
// precision over the same numbers, every epilogue, odd sizes and strides.
#include "cuda_linear_coded_checker.cuh"

namespace maga::bench {
namespace {

struct Size {
  int n, k;
};

}  // namespace

int check_quantized(cudaStream_t stream, bool small) {
  using Shift = cuda::AffineShift;
  CodedChecker coded(stream);
  Checker& checker = coded.checker;
  CodeForm& form = coded.form;
  cuda::Affines affines;
  const std::vector<Size> sizes = {Size{960, 576}, Size{7, 128}, Size{129, 1024}, Size{1032, 2048}};
  const std::vector<ActivationKind> kinds = {ActivationKind::silu, ActivationKind::gelu, ActivationKind::gelu_tanh,
                                             ActivationKind::relu};
  const std::vector<int> many = {1, 8, 13, 32, 47, 64, 100, 128, 200, 300}, several = {1, 5, 16, 33, 64, 65, 130, 192, 300};
  int forms = 0;
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
    coded.take(each);
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
  std::printf("%d forms, %d weights wrong; ", forms, coded.wrong);
  return checker.report() + coded.wrong;
}

}  // namespace maga::bench
