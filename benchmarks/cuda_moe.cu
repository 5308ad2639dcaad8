// Checks rows of the CUDA mixtures of experts against sums in double precision, and times them, on layers of real models:
//   cuda_moe          bf16 weights
//   cuda_moe codes    4 and 8 bits, e4m3
// Times are replays of a CUDA graph of eight calls over the same weights, of which the L2 holds a small part. The floor is what the
// experts that the rows choose take to read at 4.51 TB/s, or their products at 800 TFLOP/s, whichever is longer.
#include <cmath>
#include <cstdio>
#include <memory>
#include <numeric>
#include <set>

#include "backends/cuda/moe.h"
#include "cuda_linear_quantized.h"

namespace maga::bench {
namespace {

using bf16 = __nv_bfloat16;

constexpr double kBytesPerUs = 4.51e6, kFlopsPerUs = 800e6;
constexpr int kCalls = 8, kMostTokens = 4096;

struct Layer {
  const char* name;
  int hidden, width, experts, top_k;
};
constexpr Layer kLayers[] = {{"Mixtral-8x7B", 4096, 14336, 8, 2}, {"Qwen3-30B-A3B", 2048, 768, 128, 8}};

__global__ void fill_rows(bf16* data, int64_t count, float scale, uint32_t seed) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll)
    data[i] = __float2bfloat16((static_cast<float>(hash(i, seed) >> 8) * (2.f / 16777216.f) - 1.f) * scale);
}

__device__ double dot(const bf16* a, const bf16* b, int count) {
  double sum = 0;
  for (int i = 0; i < count; ++i) sum += static_cast<double>(__bfloat162float(a[i])) * __bfloat162float(b[i]);
  return sum;
}

// hidden = silu(gate) * up of one row and expert, rounded as the kernels round it.
__global__ void reference_hidden(const bf16* x, const bf16* gate_up, int k, int width, bf16* hidden) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= width) return;
  const double gate = dot(x, gate_up + int64_t{i} * k, k), up = dot(x, gate_up + int64_t{width + i} * k, k);
  hidden[i] = __float2bfloat16(static_cast<float>(gate / (1 + exp(-gate)) * up));
}
__global__ void reference_result(const bf16* hidden, const bf16* down, int width, int n, double weight, double* sums) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) sums[i] += weight * dot(hidden, down + int64_t{i} * width, width);
}

struct Chosen {
  int expert;
  double weight;
};
std::vector<Chosen> route(const float* logits, const Layer& layer) {
  std::vector<int> order(layer.experts);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] > logits[b]; });
  std::vector<Chosen> chosen;
  double sum = 0;
  for (int i = 0; i < layer.top_k; ++i) sum += std::exp(logits[order[i]]);
  for (int i = 0; i < layer.top_k; ++i) chosen.push_back({order[i], std::exp(logits[order[i]]) / sum});
  return chosen;
}

class Bench {
 public:
  // `form`: of codes, or null.
  Bench(const Layer& layer, const CodeForm* form)
      : layer_(layer),
        name_(form ? form->name() : "bf16"),
        limit_(form && form->e4m3 ? 0.06 : 0.02),  // e4m3's larger numbers are rounded only in what results are compared with
        op_{.out = {0, 0, layer.hidden},
            .in = {0, 0, layer.hidden},
            .width = layer.width,
            .routing = {.experts = layer.experts, .top_k = layer.top_k, .renormalise = true}},
        matrix_(int64_t{layer.hidden} * layer.width),
        gate_up_(static_cast<size_t>(2 * 2 * matrix_ * layer.experts)),
        down_(static_cast<size_t>(2 * matrix_ * layer.experts)),
        x_(size_t{2} * kMostTokens * layer.hidden),
        out_(x_.bytes()),
        logits_(size_t{4} * kMostTokens * layer.experts),
        hidden_(size_t{2} * layer.width),
        sums_(size_t{8} * layer.hidden) {
    MAGA_CUDA(cudaStreamCreate(&stream_));
    for (cudaEvent_t* event : {&begin_, &end_}) MAGA_CUDA(cudaEventCreate(event));
    const auto random = [](const DeviceBuffer& buffer, float scale, uint32_t seed) {
      fill_rows<<<1024, 256>>>(static_cast<bf16*>(buffer.at()), static_cast<int64_t>(buffer.bytes() / 2), scale, seed);
    };
    if (form) {
      // What the units stand for is what results are compared with.
      const auto coded = [&](std::unique_ptr<CodedWeight>& to, const DeviceBuffer& dense, int rows, int cols, uint32_t seed) {
        const int64_t all = int64_t{layer.experts} * rows;
        to = std::make_unique<CodedWeight>(all * cols);
        to->make(stream_, *form, DType::bf16, all, cols, seed);
        cuda::affine_unpack({stream_, false}, DType::bf16, to->layout().affine, to->units(), 0, all, cols, dense.at());
        return cuda::affine_bytes(to->layout().affine, rows, cols);
      };
      expert_bytes_ = static_cast<double>(coded(coded_gate_up_, gate_up_, 2 * layer.width, layer.hidden, 1) +
                                          coded(coded_down_, down_, layer.hidden, layer.width, 2));
    } else {
      random(gate_up_, 1.7f / std::sqrt(static_cast<float>(layer.hidden)), 1);
      random(down_, 1.7f / std::sqrt(static_cast<float>(layer.width)), 2);
      expert_bytes_ = 6. * static_cast<double>(matrix_);
    }
    random(x_, 1.7f, 3);
    for (int64_t i = 0; i < int64_t{kMostTokens} * layer.experts; ++i)
      host_logits_.push_back(static_cast<float>(hash(i, 4) >> 8) * (6.f / 16777216.f));
    MAGA_CUDA(cudaMemcpy(logits_.at(), host_logits_.data(), logits_.bytes(), cudaMemcpyHostToDevice));
    experts_ = std::make_unique<cuda::Experts>(std::vector<const Moe*>{&op_}, kMostTokens, DType::bf16, stream_);
  }

  void time(int tokens) {
    const cuda::MoeArgs args{.op = &op_,
                             .rows = tokens,
                             .logits = static_cast<const float*>(logits_.at()),
                             .logits_stride = layer_.experts,
                             .x = {x_.at(), layer_.hidden},
                             .residual = {},
                             .out = {out_.at(), layer_.hidden},
                             .gate_up = coded_gate_up_ ? coded_gate_up_->units() : gate_up_.at(),
                             .down = coded_down_ ? coded_down_->units() : down_.at(),
                             .gate_up_layout = coded_gate_up_ ? coded_gate_up_->layout() : cuda::WeightLayout{},
                             .down_layout = coded_down_ ? coded_down_->layout() : cuda::WeightLayout{}};
    MAGA_CUDA(cudaMemset(out_.at(), 0xff, out_.bytes()));
    experts_->run({stream_, true}, args);
    const double error = worst_error(tokens);
    const Graph graph(stream_, [&] {
      for (int i = 0; i < kCalls; ++i) experts_->run({stream_, true}, args);
    });
    graph.launch(stream_);
    std::vector<double> times;
    for (int i = 0; i < 5; ++i) {
      float ms = 0;
      MAGA_CUDA(cudaEventRecord(begin_, stream_));
      graph.launch(stream_);
      MAGA_CUDA(cudaEventRecord(end_, stream_));
      MAGA_CUDA(cudaStreamSynchronize(stream_));
      MAGA_CUDA(cudaEventElapsedTime(&ms, begin_, end_));
      times.push_back(ms * 1e3 / kCalls);
    }
    std::sort(times.begin(), times.end());
    std::set<int> touched;
    for (int t = 0; t < tokens; ++t)
      for (const Chosen& c : route(&host_logits_[int64_t{t} * layer_.experts], layer_)) touched.insert(c.expert);
    const double bytes = expert_bytes_ * static_cast<double>(touched.size());
    const double flops = 6. * static_cast<double>(matrix_) * tokens * layer_.top_k;
    const double us = times[2], floor = std::max(bytes / kBytesPerUs, flops / kFlopsPerUs);
    std::printf("%-14s %5d %8zu %10.1f %10.1f %6.2f %8.2f %8.1f %10.2e%s  %s\n", layer_.name, tokens, touched.size(), us, floor,
                floor / us, bytes / us / 1e6, flops / us / 1e6, error, error < limit_ ? "" : "  WRONG", name_.c_str());
    failed_ += error < 0.02 ? 0 : 1;
  }

  int failed() const { return failed_; }

 private:
  // Of three rows, relative to the element plus 1.
  double worst_error(int tokens) {
    double worst = 0;
    for (const int row : {0, tokens / 2, tokens - 1}) {
      const bf16* x = static_cast<const bf16*>(x_.at()) + int64_t{row} * layer_.hidden;
      auto* hidden = static_cast<bf16*>(hidden_.at());
      auto* sums = static_cast<double*>(sums_.at());
      MAGA_CUDA(cudaMemsetAsync(sums, 0, sums_.bytes(), stream_));
      for (const Chosen& c : route(&host_logits_[int64_t{row} * layer_.experts], layer_)) {
        const bf16* gate_up = static_cast<const bf16*>(gate_up_.at()) + 2 * matrix_ * c.expert;
        const bf16* down = static_cast<const bf16*>(down_.at()) + matrix_ * c.expert;
        reference_hidden<<<(layer_.width + 255) / 256, 256, 0, stream_>>>(x, gate_up, layer_.hidden, layer_.width, hidden);
        reference_result<<<(layer_.hidden + 255) / 256, 256, 0, stream_>>>(hidden, down, layer_.width, layer_.hidden, c.weight,
                                                                           sums);
      }
      std::vector<double> want(layer_.hidden);
      std::vector<bf16> got(layer_.hidden);
      MAGA_CUDA(cudaMemcpyAsync(want.data(), sums, sums_.bytes(), cudaMemcpyDeviceToHost, stream_));
      MAGA_CUDA(cudaMemcpyAsync(got.data(), static_cast<const bf16*>(out_.at()) + int64_t{row} * layer_.hidden,
                                got.size() * sizeof(bf16), cudaMemcpyDeviceToHost, stream_));
      MAGA_CUDA(cudaStreamSynchronize(stream_));
      for (int i = 0; i < layer_.hidden; ++i) {
        const double error = std::abs(static_cast<float>(got[i]) - want[i]) / (std::abs(want[i]) + 1);
        worst = std::isnan(error) ? INFINITY : std::max(worst, error);
      }
    }
    return worst;
  }

  Layer layer_;
  std::string name_;
  double limit_;
  double expert_bytes_ = 0;
  std::unique_ptr<CodedWeight> coded_gate_up_, coded_down_;
  Moe op_;
  int64_t matrix_;  // elements of a gate, an up or a down
  DeviceBuffer gate_up_, down_, x_, out_, logits_, hidden_, sums_;
  std::vector<float> host_logits_;
  std::unique_ptr<cuda::Experts> experts_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  int failed_ = 0;
};

}  // namespace
}  // namespace maga::bench

int main(int count, char** words) {
  using namespace maga::bench;
  const bool codes = count > 1 && std::string(words[1]) == "codes";
  const std::vector<CodeForm> forms = {
      {4, 128}, {4, 128, maga::cuda::AffineShift::zeros}, {8, 0}, {8, 0, maga::cuda::AffineShift::none, true}};
  int failed = 0;
  std::printf("%-14s %5s %8s %10s %10s %6s %8s %8s %10s\n", "", "m", "experts", "us", "floor us", "share", "TB/s", "TFLOP/s",
              "error");
  for (const Layer& layer : kLayers)
    for (size_t i = 0; i < (codes ? forms.size() : 1); ++i) {
      Bench bench(layer, codes ? &forms[i] : nullptr);
      for (const int tokens : {1, 8, 64, 256, 1024, kMostTokens}) bench.time(tokens);
      failed += bench.failed();
    }
  return failed > 0;
}
