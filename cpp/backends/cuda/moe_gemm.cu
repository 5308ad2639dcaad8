// Launches the linears of experts: which tile a call gets, and its tensor maps.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>

#include "backends/cuda/launch.cuh"
#include "backends/cuda/linear_mma.h"
#include "backends/cuda/moe_gemm_args.h"
#include "backends/cuda/moe_tiles.cuh"
#include "backends/cuda/tensor_map.h"

namespace maga::cuda {
namespace {

constexpr int kTables = (sizeof(MoeTiles) + 255) / 256 * 256;
// Bytes of ring that a CTA may have, alone on its SM and if two share it.
constexpr int kMostShared = 232448 - kTables, kSharedOfTwo = 114688 - kTables;

int divide_up(int a, int b) { return (a + b - 1) / b; }
bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// Tiles should hold the slots that an expert is likely to have, and rows should leave no SM idle in the last round.
MoeConfig choose(const MoeGemmArgs& args, int rows, int sms) {
  const double touched = args.experts * (1 - std::pow(1 - double(args.top_k) / args.experts, args.tokens));
  const double slots = double(args.tokens) * args.top_k / touched;
  const MoeConfig* best = nullptr;
  double best_used = 0;
  for (const MoeConfig& config : kMoeConfigs) {
    const bool fits = config.slots >= 1.5 * slots || config.slots == 128;
    if (!fits || (best && best->slots != config.slots)) continue;
    // By SMs: two CTAs that share one also share its part of the bandwidth.
    const double rounds = touched * divide_up(rows, config.rows) * std::ceil(slots / config.slots) / sms;
    const double used = rounds / std::ceil(rounds - 1e-9);
    if (used > best_used * (best ? 1.05 : 1)) best = &config, best_used = used;
  }
  return *best;
}

int step_bytes(const MoeConfig& config) { return (config.slots + config.rows) * 128 * config.boxes; }

// Bytes beside the ring: 1024 to align, and staging, or what a 64-row tile of fewer rows reads past the ring's end.
int fixed_bytes(const MoeConfig& config) {
  const int covered = divide_up(config.rows, 64 * config.groups) * 64 * config.groups;
  const int past = std::max(0, covered - config.rows - config.slots) * 128;
  return 1024 + kMoeHeader + std::max(past, 4 * config.groups * moe_staging_bytes(config.slots));
}

// Eight rows of the gate, the eight of up that belong to them, the next eight of the gate, ...; without a gate, all in turn.
CUtensorMap weight_map(DType type, const MoeGemmArgs& args, int box_rows) {
  const auto k = static_cast<uint64_t>(args.k), n = static_cast<uint64_t>(args.n), halves = args.gated ? uint64_t{2} : 1;
  return tensor_map(type, args.weight,
                    {.rank = 5,
                     .sizes = {k, 8, halves, n / 8, static_cast<uint64_t>(args.experts)},
                     .strides = {k, n * k, 8 * k, halves * n * k},
                     .box = {64, 8, static_cast<cuuint32_t>(halves), static_cast<cuuint32_t>(box_rows / (8 * halves)), 1}});
}

CUtensorMap slot_map(DType type, const MoeGemmArgs& args, int box_slots) {
  const auto k = static_cast<uint64_t>(args.k), slots = static_cast<uint64_t>(args.tokens) * args.top_k;
  return tensor_map(type, args.x,
                    {.rank = 2, .sizes = {k, slots}, .strides = {k}, .box = {64, static_cast<cuuint32_t>(box_slots)}});
}

}  // namespace

MoeGemm::MoeGemm(DType type) : type_(type), mmas_(std::make_unique<Mmas>()) {
  int device = 0, major = 0;
  MAGA_CUDA(cudaGetDevice(&device));
  MAGA_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  MAGA_CUDA(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, device));
  hopper_ = major == 9;
}

MoeGemm::~MoeGemm() = default;

bool MoeGemm::takes(const MoeGemmArgs& args) const {
  return hopper_ && type_ != DType::f32 && args.k % 8 == 0 && args.n % 8 == 0 && aligned(args.weight) && aligned(args.x);
}

void MoeGemm::run(const Queue& queue, const MoeGemmArgs& args) {
  if (args.layout.form != WeightForm::dense) {
    MAGA_CHECK(mmas_->takes(type_, args), "experts of ", args.n, " rows as codes");
    mmas_->run(queue, type_, args);
  } else if (takes(args))
    run_tiles(queue, args);
  else
    moe_plain(queue, type_, sms_, args);
}

void MoeGemm::run_tiles(const Queue& queue, const MoeGemmArgs& args) {
  const int rows = args.gated ? 2 * args.n : args.n;
  const MoeConfig config = choose(args, rows, sms_);
  const MoeKernel kernel = type_ == DType::bf16 ? moe_kernel<__nv_bfloat16>(config) : moe_kernel<__half>(config);
  if (std::find(raised_.begin(), raised_.end(), reinterpret_cast<const void*>(kernel)) == raised_.end()) {
    MAGA_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostShared));
    raised_.push_back(reinterpret_cast<const void*>(kernel));
  }
  const int shared = config.slots <= 64 ? kSharedOfTwo : kMostShared;
  const int stages = std::min(kMoeMostStages, (shared - fixed_bytes(config)) / step_bytes(config));
  const MoeTileArgs arguments{.out = args.out,
                              .bias = args.bias,
                              .counts = args.counts,
                              .experts = args.experts,
                              .rows = rows,
                              .steps = divide_up(args.k, 64 * config.boxes),
                              .stages = stages,
                              .first = args.gated,
                              .gated = args.gated,
                              .gating = args.gating};
  const int ctas = config.slots <= 64 ? 2 * sms_ : sms_;
  launch(queue, kernel, dim3(ctas), dim3(128 * config.groups + 64), fixed_bytes(config) + stages * step_bytes(config), arguments,
         weight_map(type_, args, config.rows), slot_map(type_, args, config.slots));
}

}  // namespace maga::cuda
