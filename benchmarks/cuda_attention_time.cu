// Graphs of many runs, each over other pages, so that no run finds its keys in L2; dependent launch as in a decode step.
#include <algorithm>
#include <cstdio>
#include <functional>

#include "backends/cuda/stream.h"
#include "cuda_attention.h"

namespace maga::cuda {
namespace {

constexpr double kBandwidth = 4.5e12;  // bytes/s that a plain read reaches on an H200

struct Model {
  const char* name;
  int heads, kv_heads, head_dim;
};

struct Pool {
  DeviceArray<uint8_t> bytes;
  explicit Pool(size_t size) : bytes(size) { fill_random(bytes.get(), DType::bf16, size / 2, 7); }
};

// Median microseconds of a run, and those of planning once where the plan can be captured.
struct Times {
  double run = 0, plan = 0;
};

double replay(cudaStream_t stream, int count, const std::function<void(int)>& work) {
  const Graph graph(stream, [&] {
    for (int i = 0; i < count; ++i) work(i);
  });
  const Event begin(true), end(true);
  std::vector<float> times;
  for (int i = 0; i < 6; ++i) {
    MAGA_CUDA(cudaEventRecord(begin.get(), stream));
    graph.launch(stream);
    MAGA_CUDA(cudaEventRecord(end.get(), stream));
    MAGA_CUDA(cudaStreamSynchronize(stream));
    float ms = 0;
    MAGA_CUDA(cudaEventElapsedTime(&ms, begin.get(), end.get()));
    if (i > 0) times.push_back(ms);  // the first warms up
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2] * 1e3 / count;
}

enum class Way { own, fa3, fa3_own_keys };  // own: the kernels of attention_mma

Times time_step(const Model& model, const StepSizes& shape, DType kv_type, Pool& pool, Way way, bool captured, const Queue& queue) {
  const AttentionShape form{model.heads, model.kv_heads, model.head_dim, model.head_dim, 0, way == Way::own};
  const int64_t page_bytes = page_bytes_of(form, kv_type, shape.page_tokens, {}), pool_pages = pool.bytes.bytes() / page_bytes;
  int64_t pages = 0;
  for (const SequenceSize& s : shape.sequences) pages += (s.kv_length + shape.page_tokens - 1) / shape.page_tokens;
  const bool decode = shape.sequences[0].tokens == 1;
  const int sets = decode ? static_cast<int>(std::clamp<int64_t>(pool_pages / pages, 1, 16)) : 1;
  std::mt19937 random(3);
  StepSizes all = shape;
  for (int i = 1; i < sets; ++i) all.sequences.insert(all.sequences.end(), shape.sequences.begin(), shape.sequences.end());
  const MadeStep made(shape, pool_pages, false, random), made_all(all, pool_pages, false, random);
  const int64_t width = int64_t{model.heads} * model.head_dim;
  DeviceArray<uint8_t> q(made.device.tokens * width * 2), out(made.device.tokens * width * 2);
  fill_random(q.get(), DType::bf16, made.device.tokens * width, 5);
  AttentionArgs args{.q = q.get(),
                     .q_stride = width,
                     .out = out.get(),
                     .out_stride = width,
                     .scale = 1.f / std::sqrt(static_cast<float>(model.head_dim)),
                     .layer = layer_in(pool.bytes.get(), form, kv_type, shape.page_tokens, {})};
  const int64_t kv_width = int64_t{model.kv_heads} * model.head_dim;
  DeviceArray<uint8_t> k(made.device.tokens * kv_width * 2), v(made.device.tokens * kv_width * 2);
  if (way == Way::fa3_own_keys) {
    copy_own_keys(k.get(), v.get(), kv_width, kv_width, DType::bf16, args.layer, kv_type, made.device);
    args.k = k.get(), args.v = v.get(), args.k_stride = args.v_stride = kv_width;
  }
  AttentionPlan plan(form, DType::bf16, kv_type, shape.page_tokens, made.device.tokens, made.device.sequences, pool_pages);
  std::vector<DeviceStep> steps;
  for (int i = 0; i < sets; ++i) {
    steps.push_back(made.device);
    steps.back().pages = made_all.device.pages + i * made.pages_used();
  }
  plan.plan(queue, made.device, captured ? nullptr : &made.host);
  MAGA_CUDA(cudaDeviceSynchronize());
  Times times;
  times.run = replay(queue.stream, decode ? 32 : 4, [&](int i) { plan.run(queue, steps[i % sets], args); });
  if (captured) times.plan = replay(queue.stream, 32, [&](int) { plan.plan(queue, made.device, nullptr); });
  return times;
}

}  // namespace

void time_attention(int only_batch, int only_context) {
  const Stream stream;
  int device = 0, major = 0;
  MAGA_CUDA(cudaGetDevice(&device));
  MAGA_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  const Queue queue{.stream = stream.get(), .overlap = major >= 9};
  Pool pool(size_t{9} << 30);

  const Model llama{"32/8 x 128", 32, 8, 128};
  const DType kv_types[] = {DType::bf16, DType::i8, DType::f8_e4m3, DType::f8_e5m2};
  std::printf("%-14s %-26s %8s", "heads", "decode, us (of 4.5 TB/s)", "plan us");
  for (const DType type : kv_types) std::printf(" %16s", std::string(name_of(type)).c_str());
  std::printf("\n");
  const auto decode = [&](const Model& model, const char* name, const std::vector<SequenceSize>& sequences) {
    double keys = 0;
    for (const SequenceSize& s : sequences) keys += s.kv_length;
    const CacheLayer layer{model.kv_heads, model.head_dim, model.head_dim};
    for (const DType type : kv_types) {
      const Times t = time_step(model, {.sequences = sequences}, type, pool, Way::fa3, true, queue);
      if (type == DType::bf16) std::printf("%-14s %-26s %8.1f", model.name, name, t.plan);
      std::printf(" %10.1f (%.2f)", t.run, keys * static_cast<double>(layer.entry_bytes(type)) / (t.run * 1e-6) / kBandwidth);
    }
    std::printf("\n");
  };
  const auto decode_llama = [&](int batch, int context) {
    decode(llama, ("batch " + std::to_string(batch) + ", " + std::to_string(context)).c_str(),
           std::vector(batch, SequenceSize{1, context}));
  };
  if (only_batch > 0) return decode_llama(only_batch, only_context);
  for (const int batch : {1, 8, 64, 256})
    for (const int context : {256, 2048, 8192}) decode_llama(batch, context);
  std::vector<SequenceSize> skewed(63, {1, 512});
  skewed.push_back({1, 65536});
  decode(llama, "63 x 512, 1 x 65536", skewed);
  std::vector<SequenceSize> ragged;
  for (int i = 0; i < 128; ++i) ragged.push_back({1, 100 + i * 31});
  decode(llama, "128 x 100..4037", ragged);
  decode({"32/8 x 64", 32, 8, 64}, "batch 64, 2048", std::vector(64, SequenceSize{1, 2048}));
  decode({"28/4 x 128", 28, 4, 128}, "batch 64, 2048", std::vector(64, SequenceSize{1, 2048}));
  decode({"32/32 x 128", 32, 32, 128}, "batch 16, 2048", std::vector(16, SequenceSize{1, 2048}));
  decode({"16/8 x 256", 16, 8, 256}, "batch 32, 2048", std::vector(32, SequenceSize{1, 2048}));
  decode({"32/2 x 80", 32, 2, 80}, "batch 64, 2048", std::vector(64, SequenceSize{1, 2048}));

  std::printf("%-14s %-26s %10s %10s %10s %10s %12s %10s %10s %10s\n", "heads", "prefill", "own us", "TFLOP/s", "fa3 us", "TFLOP/s",
              "own keys us", "TFLOP/s", "int8 us", "TFLOP/s");
  const auto prefill = [&](const Model& model, const char* name, const std::vector<SequenceSize>& sequences) {
    double pairs = 0;
    for (const SequenceSize& s : sequences) pairs += s.tokens * (s.kv_length - s.tokens + (s.tokens + 1) / 2.0);
    const double flop = 4 * pairs * model.heads * model.head_dim;
    std::printf("%-14s %-26s", model.name, name);
    for (const auto& [way, type] :
         {std::pair{Way::own, DType::bf16}, {Way::fa3, DType::bf16}, {Way::fa3_own_keys, DType::bf16}, {Way::own, DType::i8}}) {
      const double us = time_step(model, {.sequences = sequences}, type, pool, way, false, queue).run;
      std::printf(" %10.1f %10.0f", us, flop / us * 1e-6);
    }
    std::printf("\n");
  };
  prefill(llama, "1 x 1024", {{1024, 1024}});
  prefill(llama, "1 x 8192", {{8192, 8192}});
  prefill(llama, "8 x 2048", std::vector(8, SequenceSize{2048, 2048}));
  prefill(llama, "16 x 512", std::vector(16, SequenceSize{512, 512}));
  for (const int tokens : {16, 32, 64, 128, 256, 512})
    prefill(llama, ("1 x " + std::to_string(tokens) + " of 2048").c_str(), {{tokens, 2048}});
  for (const int tokens : {32, 64, 128})
    prefill(llama, ("32 x " + std::to_string(tokens) + " of 1024").c_str(), std::vector(32, SequenceSize{tokens, 1024}));
  prefill({"32/8 x 64", 32, 8, 64}, "8 x 2048", std::vector(8, SequenceSize{2048, 2048}));
  prefill({"16/8 x 256", 16, 8, 256}, "8 x 2048", std::vector(8, SequenceSize{2048, 2048}));
}

}  // namespace maga::cuda
