// Compares the CUDA linears with sums in double precision: every kernel and configuration, every epilogue, odd sizes and strides.
#include "cuda_linear_checker.cuh"

namespace maga::bench {
namespace {

// Every epilogue and alignment, through Linears.
void check_calls(Checker& checker, bool small) {
  struct Size {
    int n, k;
  };
  for (const DType type : {DType::bf16, DType::f16, DType::f32})
    for (const auto [n, k] :
         {Size{960, 576}, Size{1000, 72}, Size{8, 40}, Size{7, 24}, Size{129, 1000}, Size{34, 30}, Size{2048, 2048}})
      for (const int m : {1, 3, 8, 9, 16, 17, 32, 33, 64, 65, 130, 192, 300}) {
        if (small && (m % 8 == 0 || m > 65 || n > 200)) continue;
        if (n * m > 300000 && type != DType::bf16) continue;
        const Case plain{.type = type, .m = m, .n = n, .k = k};
        auto with = [&](auto&& change) {
          Case c = plain;
          change(c);
          checker.check(c);
        };
        checker.check(plain);
        with([](Case& c) { c.bias = true; });
        with([](Case& c) { c.residual = Case::apart; });
        with([](Case& c) { c.residual = Case::in_place, c.bias = true; });
        with([](Case& c) { c.out_f32 = true, c.out_pad = 3; });
        with([](Case& c) { c.out_f32 = true, c.bias = true, c.residual = Case::apart; });
        with([](Case& c) { c.slabs = true; });
        with([](Case& c) { c.slabs = true, c.bias = true; });
        with([](Case& c) { c.x_shift = 16, c.x_pad = 64, c.out_shift = 8, c.out_pad = 8; });
        with([](Case& c) { c.x_shift = 1, c.x_pad = 3, c.out_shift = 3, c.out_pad = 5, c.residual = Case::in_place; });
        if (k >= 576) with([](Case& c) { c.x_pad = 4, c.bias = true; });
        for (const ActivationKind kind :
             {ActivationKind::silu, ActivationKind::gelu, ActivationKind::gelu_tanh, ActivationKind::relu})
          with([&](Case& c) { c.gated = true, c.activation = kind, c.bias = kind != ActivationKind::relu, c.out_pad = n % 2 * 3; });
      }
}

// Every tiled kernel, sharing either operand, on sizes that leave tiles, pairs and steps part empty; the last size makes each CTA
// take several tiles.
void check_tiles(Checker& checker, bool small) {
  struct Size {
    int m, n, k;
  };
  for (const DType type : {DType::bf16, DType::f16})
    for (const cuda::Tile& tile : cuda::kTiles)
      for (const bool share_weights : {true, false})
        for (const auto [m, n, k] : {Size{65, 1208, 1032}, Size{100, 48, 72}, Size{385, 520, 520}, Size{520, 8208, 264}}) {
          if (!cuda::has_tile(tile, false) || (small && (type != DType::bf16 || m > 100))) continue;
          const Case plain{.type = type, .m = m, .n = n, .k = k};
          auto with = [&](int split, auto&& change) {
            Case c = plain;
            change(c);
            checker.check(c, cuda::TileConfig{tile, share_weights, split});
          };
          with(1, [](Case& c) { c.bias = true, c.residual = Case::in_place, c.out_pad = 8, c.x_shift = 8, c.x_pad = 16; });
          with(1, [](Case& c) { c.gated = true, c.bias = true, c.out_pad = 8; });
          if (m > 500 && type != DType::bf16) continue;
          with(1, [](Case& c) { c.residual = Case::apart; });
          with(1, [](Case& c) { c.out_f32 = true, c.bias = true, c.residual = Case::apart; });
          for (const ActivationKind kind : {ActivationKind::gelu, ActivationKind::gelu_tanh, ActivationKind::relu})
            with(1, [&](Case& c) { c.gated = true, c.activation = kind; });
          for (const int split : {2, 5})
            if (k >= split * 64 && m < 500) with(split, [](Case& c) { c.slabs = true; });
        }
}

// Every streaming kernel in every configuration, on sizes that leave tiles, boxes and tokens part empty.
void check_configs(Checker& checker, int sms, bool small) {
  for (const DType type : {DType::bf16, DType::f16})
    for (const int m : {1, 5, 8, 13, 16, 30, 32, 47, 64}) {
      if (small && (m % 8 == 0 || m == 1 || type != DType::bf16)) continue;
      for (const bool slabs : {false, true})
        for (const auto& config : cuda::stream_configs({.m = m, .rows = 1205, .k = 1032, .may_split = slabs, .sms = sms})) {
          if (slabs != (config.split > 1)) continue;
          checker.check({.type = type, .m = m, .n = 1205, .k = 1032, .bias = true, .slabs = slabs}, config);
        }
      // Fewer SMs: several tiles a CTA.
      for (const auto& config : cuda::stream_configs({.m = m, .rows = 2 * 600, .k = 648, .may_split = false, .sms = 2}))
        checker.check({.type = type, .m = m, .n = 600, .k = 648, .gated = true}, config);
      for (const auto& config : cuda::stream_configs({.m = m, .rows = 700, .k = 1000, .may_split = true, .sms = 3}))
        checker.check({.type = type, .m = m, .n = 700, .k = 1000, .slabs = config.split > 1}, config);
    }
}

}  // namespace

int check_linears(cudaStream_t stream, bool small, bool only_tiles) {
  int device = 0, sms = 0, major = 0;
  MAGA_CUDA(cudaGetDevice(&device));
  MAGA_CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  MAGA_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  Checker checker(stream);
  if (major == 9) check_tiles(checker, small);
  if (major == 9 && !only_tiles) check_configs(checker, sms, small);
  if (!only_tiles) check_calls(checker, small);
  for (const DType type : {DType::bf16, DType::f16})
    for (const int m : {1, 8, 16, 31, 64, 100, 256}) checker.check_overlap(type, m, 1024, 2048, 12);
  return checker.report();
}

}  // namespace maga::bench
