// Random steps over every head size, group, type and feature, against the definition in double precision.
#include <cstdio>

#include "backends/cuda/launch.cuh"
#include "backends/cuda/rows.h"
#include "backends/cuda/stream.h"
#include "cuda_attention.h"

namespace maga::cuda {
namespace {

struct Features {
  const char* name = "";
  int64_t window = 0;
  float soft_cap = 0;
  bool alibi = false, sinks = false, tree = false;
};

struct Case {
  AttentionShape shape;
  DType type = DType::bf16, kv_type = DType::bf16;
  Features features;
  StepSizes step;
  const char* step_name = "";
  bool captured = false;  // in a graph, made when the step was empty
  bool own_keys = false;  // the step's own keys and values are given outside the pages too
};

struct Outcome {
  double error = 0, worst_row = 0;
  std::string fault;
};

double value_of(DType type, const std::vector<uint8_t>& bytes, size_t i) {
  if (type == DType::f32) return reinterpret_cast<const float*>(bytes.data())[i];
  const uint16_t bits = reinterpret_cast<const uint16_t*>(bytes.data())[i];
  return type == DType::f16 ? f16_to_float(bits) : bf16_to_float(bits);
}

// In front of attention that reads early, as prepare_qkv is.
__global__ void pass() {
  wait_for_previous();
  allow_next();
}

Outcome run(const Case& c, const Queue& queue, uint32_t seed) {
  std::mt19937 random(seed);
  int64_t pages = 3;
  for (const SequenceSize& s : c.step.sequences) pages += (s.kv_length + c.step.page_tokens - 1) / c.step.page_tokens;
  const MadeStep made(c.step, pages, c.features.tree, random);
  const AttentionShape& shape = c.shape;

  // A page as the engine has it: keys, values, and something of other layers.
  const PageBytes other{.before = 128, .rest = 256};
  DeviceArray<uint8_t> pool(pages * page_bytes_of(shape, c.kv_type, c.step.page_tokens, other));
  const KvLayer layer = layer_in(pool.get(), shape, c.kv_type, c.step.page_tokens, other);
  fill_pages(layer, c.kv_type, made.device, seed);

  const int tokens = made.device.tokens;
  const int64_t q_stride = shape.heads * shape.head_dim + 64, out_stride = shape.heads * shape.v_dim + 8;
  DeviceArray<uint8_t> q(tokens * q_stride * size_of(c.type)), out(tokens * out_stride * size_of(c.type));
  fill_random(q.get(), c.type, tokens * q_stride, seed + 1);
  std::vector<float> slopes(shape.heads);
  for (int i = 0; i < shape.heads; ++i) slopes[i] = 0.5f / (1 + i);
  DeviceArray<float> device_slopes(slopes);
  DeviceArray<uint8_t> sinks(shape.heads * size_of(c.type));
  fill_random(sinks.get(), c.type, shape.heads, seed + 2);
  AttentionArgs args{.q = q.get(),
                     .q_stride = q_stride,
                     .out = out.get(),
                     .out_stride = out_stride,
                     .scale = 1.f / std::sqrt(static_cast<float>(shape.head_dim)),
                     .soft_cap = c.features.soft_cap,
                     .alibi_slopes = c.features.alibi ? device_slopes.get() : nullptr,
                     .sinks = c.features.sinks ? sinks.get() : nullptr,
                     .layer = layer};
  const int64_t k_stride = shape.kv_heads * shape.head_dim + 8, v_stride = shape.kv_heads * shape.v_dim + 16;
  DeviceArray<uint8_t> k(tokens * k_stride * size_of(c.type)), v(tokens * v_stride * size_of(c.type));
  const bool given = c.own_keys || is_code(c.kv_type);
  if (given || c.captured) {
    copy_own_keys(k.get(), v.get(), k_stride, v_stride, c.type, layer, c.kv_type, made.device);
    if (given) args.k = k.get(), args.v = v.get(), args.k_stride = k_stride, args.v_stride = v_stride;
  }
  DeviceArray<double> want(static_cast<size_t>(tokens) * shape.heads * shape.v_dim);
  attention_reference(want.get(), c.type, c.kv_type, shape, made.device, args);

  AttentionPlan plan(shape, c.type, c.kv_type, c.step.page_tokens, tokens, made.device.sequences, pages);
  std::vector<uint8_t> first, got;
  MAGA_CUDA(cudaDeviceSynchronize());
  if (c.captured) {
    StepSizes empty{.padding_tokens = tokens, .padding_sequences = made.device.sequences, .page_tokens = c.step.page_tokens};
    const MadeStep at_capture(empty, 1, false, random);
    // The graph reads these arrays, whatever they hold when it runs.
    const auto copy = [&](const int32_t* to, const int32_t* from, size_t count) {
      MAGA_CUDA(cudaMemcpy(const_cast<int32_t*>(to), from, count * 4, cudaMemcpyDeviceToDevice));
    };
    DeviceStep step = made.device;
    DeviceArray<int32_t> start(step.sequences + 1), length(step.sequences), page_start(step.sequences + 1);
    step.sequence_start = start.get(), step.kv_length = length.get(), step.page_start = page_start.get();
    const auto set = [&](const DeviceStep& from) {
      copy(step.sequence_start, from.sequence_start, step.sequences + 1);
      copy(step.kv_length, from.kv_length, step.sequences);
      copy(step.page_start, from.page_start, step.sequences + 1);
      MAGA_CUDA(cudaDeviceSynchronize());
    };
    set(at_capture.device);
    args.after_prepare = true;
    PrepareArgs own{.k = {k.get(), k_stride}, .v = {v.get(), v_stride}, .rows = tokens, .kv_heads = shape.kv_heads, .layer = layer};
    own.kv_type = c.kv_type;
    Graph graph(queue.stream, [&] {
      plan.plan(queue, step, nullptr);
      if (c.type == c.kv_type)
        prepare_qkv(queue, c.type, step, own);
      else
        launch(queue, pass, 1, 1, 0);
      plan.run(queue, step, args);
      plan.run(queue, step, args);
    });
    graph.launch(queue.stream);
    MAGA_CUDA(cudaStreamSynchronize(queue.stream));
    set(made.device);
    for (auto* to : {&first, &got}) {
      out.fill(0xff);
      if (c.type == c.kv_type) {  // the step's own keys and values come late
        DeviceArray<uint8_t> nothing(std::max(k.bytes(), v.bytes()));
        nothing.fill(0xff);
        PrepareArgs none = own;
        none.k.data = none.v.data = nothing.get();
        prepare_qkv(queue, c.type, step, none);
        MAGA_CUDA(cudaStreamSynchronize(queue.stream));
      }
      MAGA_CUDA(cudaDeviceSynchronize());
      graph.launch(queue.stream);
      MAGA_CUDA(cudaStreamSynchronize(queue.stream));
      *to = out.download();
    }
  } else {
    for (auto* to : {&first, &got}) {
      out.fill(0xff);
      MAGA_CUDA(cudaDeviceSynchronize());
      plan.plan(queue, made.device, &made.host);
      plan.run(queue, made.device, args);
      MAGA_CUDA(cudaStreamSynchronize(queue.stream));
      *to = out.download();
    }
  }

  Outcome outcome;
  if (first != got) outcome.fault = "two runs differ";
  const std::vector<double> reference = want.download();
  double error = 0, norm = 0;
  for (int t = 0; t < tokens; ++t)
    for (int h = 0; h < shape.heads; ++h) {
      double row_error = 0, row_norm = 0;
      for (int i = 0; i < shape.v_dim; ++i) {
        const double x = value_of(c.type, got, t * out_stride + h * shape.v_dim + i);
        const double r = reference[(static_cast<size_t>(t) * shape.heads + h) * shape.v_dim + i];
        if (!std::isfinite(x)) outcome.fault = "not finite, or not written";
        if (t >= made.host.tokens() && x != 0) outcome.fault = "padding is not zero";
        row_error += (x - r) * (x - r), row_norm += r * r;
      }
      error += row_error, norm += row_norm;
      if (row_norm > 0) outcome.worst_row = std::max(outcome.worst_row, std::sqrt(row_error / row_norm));
    }
  outcome.error = std::sqrt(error / norm);
  // Bytes between rows must stay as they were.
  const int64_t size = size_of(c.type);
  for (int t = 0; t < tokens; ++t)
    for (int64_t i = shape.heads * shape.v_dim * size; i < out_stride * size; ++i)
      if (got[t * out_stride * size + i] != 0xff) outcome.fault = "wrote between the rows";
  const double limit = c.type == DType::f32 ? 2e-6 : c.type == DType::f16 ? 1e-3 : 8e-3;
  if (!(outcome.error < limit) || !(outcome.worst_row < 4 * limit)) outcome.fault += " off";
  return outcome;
}

// Steps of each kind. `few`: short lengths, for the memory checker.
std::vector<std::pair<const char*, StepSizes>> steps(bool few) {
  std::vector<std::pair<const char*, StepSizes>> list = {
      {"decode", {.sequences = {{1, 1}, {1, 16}, {1, 17}, {1, 700}, {1, 130}}, .padding_tokens = 3, .padding_sequences = 3}},
      {"mixed", {.sequences = {{1, 65}, {1, 40}, {5, 300}, {33, 33}, {70, 161}}, .page_tokens = 32}},
  };
  if (few) return list;
  list.push_back({"long decode", {.sequences = {{1, 4000}, {1, 9}}}});
  list.push_back({"prefill", {.sequences = {{1, 500}, {200, 200}, {64, 1500}, {129, 1025}}, .padding_tokens = 5}});
  list.push_back({"odd order", {.sequences = {{300, 300}, {1, 2000}, {7, 7}, {1, 1}}, .page_tokens = 64}});
  return list;
}

}  // namespace

int check_attention(bool few) {
  const Stream stream;
  int device = 0, major = 0;
  MAGA_CUDA(cudaGetDevice(&device));
  MAGA_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  const Queue queue{.stream = stream.get(), .overlap = major >= 9};
  const Features features[] = {{.name = "plain"},
                               {.name = "window", .window = 50},
                               {.name = "soft cap", .soft_cap = 3},
                               {.name = "alibi", .alibi = true},
                               {.name = "sinks", .sinks = true},
                               {.name = "tree", .tree = true},
                               {.name = "all", .window = 130, .soft_cap = 5, .alibi = true, .sinks = true, .tree = true}};
  int cases = 0, failed = 0;
  double worst[3] = {};  // f32, f16, bf16
  const auto check = [&](Case c, const Features& f) {
    c.features = f;
    c.shape.window = f.window;
    c.shape.special_scores = f.soft_cap > 0 || f.alibi || f.sinks;
    for (const auto& [name, step] : steps(few)) {
      c.step = step, c.step_name = name;
      bool decode = true;
      for (const SequenceSize& s : step.sequences) decode &= s.tokens == 1;
      const bool plain = c.type == c.kv_type && f.window == 0 && !c.shape.special_scores && !f.tree;
      for (const auto& [captured, own_keys] : {std::pair(false, false), {true, false}, {false, true}}) {
        if ((captured && (!decode || f.tree)) || (own_keys && (decode || !plain))) continue;
        c.captured = captured, c.own_keys = own_keys;
        const Outcome o = run(c, queue, 1000 + cases);
        ++cases;
        double& most = worst[c.type == DType::f32 ? 0 : c.type == DType::f16 ? 1 : 2];
        most = std::max(most, o.error);
        if (o.fault.empty()) continue;
        if (++failed <= 40)
          std::printf("FAILED %s/%s, %d heads over %d, head size %d/%d, %s, %s%s%s: error %.2e, worst row %.2e, %s\n",
                      std::string(name_of(c.type)).c_str(), std::string(name_of(c.kv_type)).c_str(), c.shape.heads,
                      c.shape.kv_heads, c.shape.head_dim, c.shape.v_dim, f.name, name, captured ? ", captured" : "",
                      own_keys ? ", own keys" : "", o.error, o.worst_row, o.fault.c_str());
      }
    }
  };
  constexpr int head_dims[] = {64, 80, 96, 112, 128, 160, 192, 256};
  const int groups[] = {4, 1, 7, 16, 8, 2, 20, 3};
  int turn = 0;
  for (const DType type : {DType::bf16, DType::f16})
    for (const int head_dim : head_dims)
      for (const Features& f : features) {
        if (few && (type == DType::f16 || (head_dim != 80 && head_dim != 128))) continue;
        const int group = groups[turn++ % 8], kv_heads = group > 8 ? 1 : 2;
        check({.shape = {group * kv_heads, kv_heads, head_dim, head_dim}, .type = type, .kv_type = type}, f);
      }
  for (const DType kv_type : {DType::i8, DType::f8_e4m3, DType::f8_e5m2})
    for (const int head_dim : head_dims)
      for (const Features& f : features) {
        if (few && head_dim != 80 && head_dim != 128) continue;
        const int group = groups[turn++ % 8], kv_heads = group > 8 ? 1 : 2;
        const DType type = turn % 3 == 0 ? DType::f16 : DType::bf16;
        check({.shape = {group * kv_heads, kv_heads, head_dim, head_dim}, .type = type, .kv_type = kv_type}, f);
      }
  // What the generic kernel takes.
  const std::tuple<DType, DType, int, int> generic[] = {
      {DType::f32, DType::f32, 64, 64},      {DType::f32, DType::f16, 128, 128},   {DType::f32, DType::bf16, 80, 80},
      {DType::bf16, DType::f32, 96, 96},     {DType::f16, DType::f32, 64, 64},     {DType::bf16, DType::f16, 128, 128},
      {DType::f16, DType::bf16, 256, 256},   {DType::bf16, DType::bf16, 192, 128}, {DType::f16, DType::f16, 72, 72},
      {DType::bf16, DType::bf16, 576, 512},  {DType::f32, DType::i8, 64, 64},      {DType::f16, DType::f8_e4m3, 40, 72},
      {DType::f32, DType::f8_e5m2, 128, 128}};
  for (const auto& [type, kv_type, head_dim, v_dim] : generic)
    for (const Features& f : features) {
      if (few && head_dim != 64) continue;
      check({.shape = {6, 2, head_dim, v_dim}, .type = type, .kv_type = kv_type}, f);
    }
  std::printf("%d cases, %d failed; largest error fp32 %.1e, fp16 %.1e, bf16 %.1e\n", cases, failed, worst[0], worst[1], worst[2]);
  return failed;
}

}  // namespace maga::cuda
