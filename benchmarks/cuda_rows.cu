// Checks and times the CUDA kernels over rows and the sampler: cuda_rows [check|small|time [rows|sample]].
// `small` is for compute-sanitizer.
#include "cuda_rows.h"

namespace maga::bench {

using namespace cuda;

namespace {

__global__ void fill(uint16_t* halves, float* floats, size_t count, float range, bool bf16) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x) {
    const float x = range * static_cast<float>(2 * uniform(9, 9, i) - 1);
    if (floats) {
      floats[i] = x;
    } else {
      halves[i] = bf16 ? static_cast<uint16_t>(__float_as_uint(x) >> 16) : static_cast<uint16_t>(i);
    }
  }
}

struct Gpu {
  cudaStream_t stream = nullptr;
  Gpu() { MAGA_CUDA(cudaStreamCreate(&stream)); }
};

cudaStream_t stream() {
  static const Gpu gpu;
  return gpu.stream;
}

double copy_rate = 0;  // bytes a microsecond, read and written

void print(const char* name, int rows, double plain, double overlapped) {
  std::printf("%-34s %6d %9.2f %9.2f us\n", name, rows, plain, overlapped);
}

void time_small(const char* name, int rows, const std::function<void(const Queue&, int)>& body) {
  print(name, rows, graph_us(64, false, body), graph_us(64, true, body));
}

void time_large(const char* name, int rows, double bytes, const std::function<void(const Queue&, int)>& body) {
  const double us = graph_us(6, true, body);
  std::printf("%-34s %6d %9.2f us  %5.1f %% of copy\n", name, rows, us, 100 * bytes / us / copy_rate);
}

// A decode step's kernels over the shapes of an 8B model, and the same over a prefill's rows.
void time_rows() {
  constexpr DType kType = DType::bf16;
  constexpr int kHidden = 4096, kInner = 14336, kHeads = 32, kKvHeads = 8, kHeadDim = 128, kPrefill = 8192, kSets = 3;
  constexpr int kQkv = (kHeads + 2 * kKvHeads) * kHeadDim;
  std::vector<std::unique_ptr<Buffer>> x, y, gate, up, qkv;
  auto make = [&](size_t bytes) {
    auto b = std::make_unique<Buffer>(bytes);
    fill_random(*b, kType, 1);
    return b;
  };
  for (int i = 0; i < kSets; ++i) {
    x.push_back(make(size_t{kPrefill} * kHidden * 2));
    y.push_back(make(size_t{kPrefill} * kHidden * 2));
    gate.push_back(make(size_t{kPrefill} * kInner * 2));
    up.push_back(make(size_t{kPrefill} * kInner * 2));
    qkv.push_back(make(size_t{kPrefill} * kQkv * 2));
  }
  const Buffer slabs(size_t{8} * 256 * kQkv * 4), weight(kHidden * 2), turns(size_t{kPrefill} * kHeadDim / 2 * 8);
  fill_random(slabs, DType::f32, 1);
  fill_random(weight, kType, 1);
  fill_random(turns, DType::f32, 1);
  std::vector<int32_t> ids(kPrefill), positions(kPrefill), sequence(kPrefill);
  std::vector<int64_t> slots(kPrefill);
  Random random(1);
  for (int i = 0; i < kPrefill; ++i) {
    ids[i] = random.below(kPrefill);
    positions[i] = random.below(100000);
    slots[i] = (i / 16 * 37 % 512) * 16 + i % 16;
  }
  const Buffer d_ids(ids), d_positions(positions), d_sequence(sequence), d_slots(slots);
  const int64_t page_stride = 2 * 16 * kKvHeads * kHeadDim;
  const Buffer pages(size_t{512} * page_stride * 2);
  std::vector<float> frequencies(64, 0.01f);
  const Buffer inv_freq(frequencies);

  auto matrix = [](const std::unique_ptr<Buffer>& b, int64_t stride) { return Matrix{b->get(), stride}; };
  auto step_of = [&](int rows) {
    return DeviceStep{.tokens = rows,
                      .sequences = 1,
                      .rows = rows,
                      .ids = d_ids.get<int32_t>(),
                      .positions = d_positions.get<int32_t>(),
                      .prompt_length = d_sequence.get<int32_t>(),
                      .slots = d_slots.get<int64_t>(),
                      .token_sequence = d_sequence.get<int32_t>(),
                      .logit_rows = d_ids.get<int32_t>()};
  };
  auto norm_body = [&](int rows, int count) {
    return [&, rows, count](const Queue& queue, int i) {
      NormArgs args{.in = matrix(x[i % kSets], kHidden),
                    .out = matrix(y[i % kSets], kHidden),
                    .rows = rows,
                    .width = kHidden,
                    .group = kHidden,
                    .weight = weight.get(),
                    .eps = 1e-5f};
      if (count > 0) {
        args.slabs = {slabs.get<float>(), count, nullptr};
        args.residual = args.sum = args.in;
      }
      norm(queue, kType, args);
    };
  };
  auto prepare_body = [&](int rows, int count, bool norms) {
    return [&, rows, count, norms](const Queue& queue, int i) {
      Matrix q = matrix(qkv[i % kSets], kQkv), k = q, v = q;
      k.data = static_cast<uint16_t*>(q.data) + kHeads * kHeadDim;
      v.data = static_cast<uint16_t*>(k.data) + kKvHeads * kHeadDim;
      PrepareArgs args{.q = q,
                       .k = k,
                       .v = v,
                       .rows = rows,
                       .heads = kHeads,
                       .kv_heads = kKvHeads,
                       .q_norm = norms ? weight.get() : nullptr,
                       .k_norm = norms ? weight.get() : nullptr,
                       .eps = 1e-6f,
                       .rotary_dim = kHeadDim,
                       .turns = turns.get<float2>(),
                       .layer = {.k = pages.get(),
                                 .v = pages.get<uint16_t>() + 16 * kKvHeads * kHeadDim,
                                 .page_stride = page_stride,
                                 .k_head_stride = 16 * kHeadDim,
                                 .v_head_stride = 16 * kHeadDim,
                                 .page_tokens = 16,
                                 .kv_heads = kKvHeads,
                                 .head_dim = kHeadDim,
                                 .v_dim = kHeadDim},
                       .kv_type = kType};
      if (count > 0) args.slabs = {slabs.get<float>(), count, nullptr};
      prepare_qkv(queue, kType, step_of(rows), args);
    };
  };
  auto activation_body = [&](int rows) {
    return [&, rows](const Queue& queue, int i) {
      activation(queue, kType,
                 {.gate = matrix(gate[i % kSets], kInner),
                  .up = matrix(up[i % kSets], kInner),
                  .out = matrix(gate[i % kSets], kInner),
                  .rows = rows,
                  .width = kInner});
    };
  };
  auto add_body = [&](int rows) {
    return [&, rows](const Queue& queue, int i) {
      add(queue, kType,
          {.a = matrix(x[i % kSets], kHidden),
           .b = matrix(y[i % kSets], kHidden),
           .out = matrix(x[i % kSets], kHidden),
           .rows = rows,
           .width = kHidden});
    };
  };
  auto embed_body = [&](int rows) {
    return [&, rows](const Queue& queue, int i) {
      embed(queue, kType, step_of(rows), {.table = x[i % kSets]->get(), .out = matrix(y[i % kSets], kHidden), .width = kHidden});
    };
  };
  std::printf("\nbf16, hidden 4096, 32 / 8 heads of 128      rows     plain  overlapped\n");
  for (const int rows : {1, 8, 64, 256}) {
    time_small("norm", rows, norm_body(rows, 0));
    time_small("norm, 2 slabs and residual", rows, norm_body(rows, 2));
    time_small("norm, 4 slabs and residual", rows, norm_body(rows, 4));
    time_small("norm, 8 slabs and residual", rows, norm_body(rows, 8));
    time_small("prepare_qkv", rows, prepare_body(rows, 0, false));
    time_small("prepare_qkv, norms", rows, prepare_body(rows, 0, true));
    time_small("prepare_qkv, 4 slabs", rows, prepare_body(rows, 4, false));
    time_small("prepare_qkv, 8 slabs and norms", rows, prepare_body(rows, 8, true));
    time_small("activation, 14336", rows, activation_body(rows));
    time_small("add", rows, add_body(rows));
    time_small("embed", rows, embed_body(rows));
    time_small("reduce, 4 slabs", rows, [&](const Queue& queue, int i) {
      reduce(queue, kType,
             {.slabs = {slabs.get<float>(), 4, nullptr},
              .residual = matrix(x[0], kHidden),
              .out = matrix(x[0], kHidden),
              .rows = rows,
              .width = kHidden});
    });
    time_small("rope_turns", rows, [&](const Queue& queue, int) {
      const DeviceStep step = step_of(rows);
      rope_turns(queue, step,
                 {.inv_freq = inv_freq.get<float>(),
                  .rotary_dim = kHeadDim,
                  .multiplier = 1,
                  .positions = step.positions,
                  .turns = turns.get<float2>()});
    });
  }
  const double row = 2.0 * kPrefill * kHidden;  // bytes of a matrix
  time_large("norm", kPrefill, 2 * row, norm_body(kPrefill, 0));
  time_large("add", kPrefill, 3 * row, add_body(kPrefill));
  time_large("embed", kPrefill, 2 * row, embed_body(kPrefill));
  time_large("activation, 14336", kPrefill, 3 * row * kInner / kHidden, activation_body(kPrefill));
  const double heads = 2.0 * kPrefill * kHeadDim;
  time_large("prepare_qkv", kPrefill, 2 * heads * (kHeads + 2 * kKvHeads), prepare_body(kPrefill, 0, false));
  time_large("prepare_qkv, norms", kPrefill, 2 * heads * (kHeads + 2 * kKvHeads), prepare_body(kPrefill, 0, true));
}

void time_sample() {
  constexpr int kVocab = 128256, kMost = 256;
  std::vector<float> logits(size_t{kMost} * kVocab);
  Random random(21);
  std::vector<float> noise(1 << 20);
  for (float& x : noise) x = random.gaussian(1);
  struct Case {
    const char* name;
    Draw draw;
  };
  constexpr Case kCases[] = {{"greedy", {}},
                             {"temperature", {.temperature = 1}},
                             {"top_p 0.9", {.temperature = 1, .top_p = 0.9f}},
                             {"top_k 50", {.temperature = 1, .top_k = 50}},
                             {"top_k 50, top_p 0.9, min_p 0.05", {.temperature = 1, .top_k = 50, .top_p = 0.9f, .min_p = 0.05f}},
                             {"top_k 1000, top_p 0.95", {.temperature = 1, .top_k = 1000, .top_p = 0.95f}}};
  for (const bool flat : {false, true}) {
    // As a model's: most tokens far below a few; or flat, where top_p keeps most of the vocabulary.
    for (size_t i = 0; i < logits.size(); ++i) {
      logits[i] = noise[(i * 7 + i / kVocab * 13) & ((1 << 20) - 1)] * (flat ? 0.5f : 2.5f);
      if (!flat && random.unit() < 3e-4) logits[i] += 14;
    }
    const Buffer d_logits(logits);
    std::printf("\nsampler, vocabulary 128256, %-14s  batch     plain  overlapped\n", flat ? "flat rows" : "a model's rows");
    for (const Case& c : kCases)
      for (const int batch : {1, 8, 64, 256}) {
        if (flat && (batch == 8 || c.draw.temperature == 0)) continue;
        std::vector<Draw> draws(batch, c.draw);
        for (int i = 0; i < batch; ++i) {
          draws[i].row = i;
          draws[i].seed = i;
        }
        const Buffer d_draws(draws), chosen(batch * 4), result(batch * sizeof(Drawn)), scratch(sample_scratch_bytes(batch));
        auto body = [&](const Queue& queue, int) {
          sample(queue, {.logits = d_logits.get<float>(),
                         .vocab = kVocab,
                         .draws = d_draws.get<Draw>(),
                         .count = batch,
                         .chosen = chosen.get<int32_t>(),
                         .result = result.get<Drawn>(),
                         .scratch = scratch.get()});
        };
        print(c.name, batch, graph_us(8, false, body), graph_us(8, true, body));
      }
  }
}

void measure_copy() {
  const Buffer a(size_t{2} << 30), b(size_t{2} << 30);
  fill_random(a, DType::bf16, 1);
  constexpr int kWidth = 4096;
  const double us = graph_us(4, false, [&](const Queue& queue, int) {  // by a kernel: a graph's own copies reach less
    narrow(queue, DType::f32, a.get<float>(), {b.get(), kWidth}, static_cast<int64_t>(a.bytes() / 4 / kWidth), kWidth);
  });
  copy_rate = 2.0 * a.bytes() / us;
  std::printf("copy: %.2f TB/s\n", copy_rate / 1e6);
}

}  // namespace

void fill_random(const Buffer& buffer, DType type, float range) {
  const bool wide = type == DType::f32;
  fill<<<1024, 256>>>(wide ? nullptr : buffer.get<uint16_t>(), wide ? buffer.get<float>() : nullptr, buffer.bytes() / size_of(type),
                      range, type == DType::bf16);
  MAGA_CUDA(cudaGetLastError());
  MAGA_CUDA(cudaDeviceSynchronize());
}

double graph_us(int launches, bool overlap, const std::function<void(const Queue&, int)>& body) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  MAGA_CUDA(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeGlobal));
  for (int i = 0; i < launches; ++i) body({stream(), overlap}, i);
  MAGA_CUDA(cudaStreamEndCapture(stream(), &graph));
  MAGA_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t start, stop;
  MAGA_CUDA(cudaEventCreate(&start));
  MAGA_CUDA(cudaEventCreate(&stop));
  std::vector<float> times;
  for (int round = 0; round < 11; ++round) {
    MAGA_CUDA(cudaEventRecord(start, stream()));
    MAGA_CUDA(cudaGraphLaunch(exec, stream()));
    MAGA_CUDA(cudaEventRecord(stop, stream()));
    MAGA_CUDA(cudaEventSynchronize(stop));
    float ms;
    MAGA_CUDA(cudaEventElapsedTime(&ms, start, stop));
    if (round > 1) times.push_back(ms);
  }
  MAGA_CUDA(cudaEventDestroy(start));
  MAGA_CUDA(cudaEventDestroy(stop));
  MAGA_CUDA(cudaGraphExecDestroy(exec));
  MAGA_CUDA(cudaGraphDestroy(graph));
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2] * 1e3 / launches;
}

}  // namespace maga::bench

int main(int argc, char** argv) {
  using namespace maga::bench;
  const std::string what = argc > 1 ? argv[1] : "";
  if (what != "time") {
    Report report;
    check_rows(report, what == "small");
    std::printf("rows: %ld cases, %ld wrong, worst error %.2f of what is allowed\n", static_cast<long>(report.cases),
                static_cast<long>(report.wrong), report.worst);
    std::fflush(stdout);
    Report sampler;
    check_sample(sampler, what == "small");
    std::printf("sampler: %ld cases, %ld wrong\n", static_cast<long>(sampler.cases), static_cast<long>(sampler.wrong));
    if (report.wrong + sampler.wrong > 0) return 1;
  }
  if (what != "check" && what != "small") {
    const std::string part = argc > 2 ? argv[2] : "";
    if (part != "sample") {
      measure_copy();
      time_rows();
      std::fflush(stdout);
    }
    if (part != "rows") time_sample();
  }
}
