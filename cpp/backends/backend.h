// The contract of a device. A backend packs weights into its own layout, turns a program into an Executable that owns the
// buffers and the K/V pages, and runs steps. Nothing above this header knows a kernel; nothing below knows a request.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backends/draw.h"
#include "program/fuse.h"
#include "program/program.h"
#include "program/step.h"
#include "program/weight.h"

namespace maga {

// A weight in a backend's own layout.
class Weight {
 public:
  virtual ~Weight() = default;
  virtual int64_t bytes() const = 0;
  // Why a quantised weight is held as dense values; empty if it is not.
  virtual std::string widened() const { return {}; }
};

// The largest step that an Executable must take, and how its K/V pages look.
struct Limits {
  int64_t tokens = 0;       // tokens of a step
  int64_t sequences = 0;    // sequences of a step
  int64_t logit_rows = 0;   // rows of logits of a step
  int64_t pages = 0;        // K/V pages in the pool; 0: as many as the device has room for, where the backend can tell
  int64_t page_tokens = 0;  // tokens a page holds, for all layers
  // Of the elements of keys and values: one type for all cache layers, or each layer's.
  std::vector<DType> kv_dtypes = {DType::f16};

  DType kv_dtype(int64_t layer) const { return kv_dtypes.size() == 1 ? kv_dtypes[0] : kv_dtypes[layer]; }
};

// A program with its weights, buffers and pages, ready to run. One thread uses it at a time.
class Executable {
 public:
  virtual ~Executable() = default;
  virtual const Program& program() const = 0;  // after fusion
  virtual const Limits& limits() const = 0;

  // Runs every op over the step. Page ids must be below limits().pages.
  virtual void run(const Step& step) = 0;
  // (step.logit_rows, vocab) of the last run, on the host, valid until the next run.
  virtual std::span<const float> logits() = 0;
  // Copies the K/V entries of page `from` to page `to` in every layer (copy-on-write), after the steps enqueued so far.
  virtual void copy_page(int32_t from, int32_t to) = 0;

  // K/V entries of a layer that are given, not computed: keys (tokens, kv_heads, head_dim) and values (tokens, kv_heads, v_dim),
  // from index 0 on in the pages from 0 on. Before the first step.
  void fill_pages(int32_t layer, std::span<const float> keys, std::span<const float> values);

  // After a step has failed: whether the device can run nothing any more, until the process starts anew.
  virtual bool lost() const { return false; }

  // --- A device that runs apart from the host and chooses tokens itself. The loop plans a step while the one before it runs. ---

  virtual bool asynchronous() const { return false; }
  // Queues a step and its draws (at most limits().logit_rows) and returns before it has run; what the spans point to is free
  // again then. An id of -1 - i in `step.ids` stands for the token that draw i of the step enqueued before chooses. At most
  // kStepsInFlight steps may be enqueued and not collected.
  static constexpr int kStepsInFlight = 2;
  virtual void enqueue(const Step& step, std::span<const Draw> draws);
  // Waits for the oldest step not collected: what its draws chose, valid until the next call. Throws Error if the step failed.
  // logits() are that step's until the next step is enqueued, if there was none behind it.
  virtual std::span<const Drawn> collect();

  // For op tests and embeddings that come from outside: rows of a value, row-major (rows, width).
  virtual void write_value(ValueId value, std::span<const float> rows) = 0;
  virtual std::vector<float> read_value(ValueId value, int64_t rows) = 0;

  // Bytes of buffers (not weights, not pages).
  virtual int64_t buffer_bytes() const = 0;
  // Seconds spent in each op of program().ops since the load; empty where a backend does not measure them.
  virtual std::vector<double> op_seconds() const { return {}; }

 private:
  virtual void fill(int32_t layer, int64_t tokens, const float* keys, const float* values);  // the sizes are checked
};

// A weight of three sizes, packed matrix by matrix, so that no more than one of them is unpacked at a time.
class WeightStack {
 public:
  explicit WeightStack(const WeightSpec& spec) : spec_(spec) {
    MAGA_REQUIRE(spec.shape.size() == 3, "weight \"", spec.name, "\" has ", spec.shape.size(), " sizes; a stack has three");
  }
  virtual ~WeightStack() = default;
  // The next matrix, (rows, cols). Throws Error as Backend::pack does.
  void add(const Canonical& matrix) {
    MAGA_REQUIRE(added_ < spec_.shape[0], "weight \"", spec_.name, "\" takes ", spec_.shape[0], " matrices");
    append({concat(spec_.name, '[', added_, ']'), {}, {spec_.shape[1], spec_.shape[2]}}, matrix);
    ++added_;
  }
  std::shared_ptr<const Weight> finish() {
    MAGA_REQUIRE(added_ == spec_.shape[0], "weight \"", spec_.name, "\" has ", added_, " of ", spec_.shape[0], " matrices");
    return packed();
  }

 protected:
  virtual void append(const WeightSpec& matrix_spec, const Canonical& matrix) = 0;
  virtual std::shared_ptr<const Weight> packed() = 0;
  const WeightSpec spec_;
  int64_t added_ = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string describe() const = 0;  // "cpu, avx512_vnni, 2 threads"
  virtual FusedOps fused_ops() const = 0;
  // Threads for host work between steps (sampling); never null.
  virtual class ThreadPool& threads() = 0;

  // Thread-safe for different weights. Throws Error naming `spec` when the form or shape cannot be taken.
  virtual std::shared_ptr<const Weight> pack(const WeightSpec& spec, const Canonical& weight) = 0;
  // For a weight of three sizes, which `pack` does not take.
  virtual std::unique_ptr<WeightStack> stack(const WeightSpec& spec) = 0;
  // Fuses, validates, allocates. `weights` are in the order of program.weights.
  virtual std::unique_ptr<Executable> load(const Program& program, std::vector<std::shared_ptr<const Weight>> weights,
                                           const Limits& limits) = 0;
};

// Bytes of one page: keys and values of limits.page_tokens tokens in every layer. Throws Error where limits.kv_dtypes are not what
// the program's layers can have: fp32, fp16, bf16, int8, fp8_e4m3, fp8_e5m2.
int64_t page_bytes(const Program& program, const Limits& limits);

struct CpuOptions {
  int threads = 0;                   // 0: one per usable core
  bool quantize_activations = true;  // int8 dot products for Affine weights; false: exact fp32 arithmetic
  std::string isa;                   // "": the best this machine has; else generic, avx2, avx512, avx512_vnni, neon, neon_dotprod
};
std::shared_ptr<Backend> make_cpu_backend(const CpuOptions& options);

struct CudaOptions {
  int device = 0;                   // as the CUDA runtime numbers them
  DType compute = DType::bf16;      // of weights and values: bf16, f16 or f32
  double memory_utilization = 0.9;  // share of the card's memory that weights, buffers and pages may take together
  // Where cuBLASLt and NCCL are looked for first: Python's packages carry them in folders that no linker knows.
  std::vector<std::string> library_folders;
};
// Loads the CUDA library that lies beside the core. Throws Error saying what is missing: the library, a driver, a card.
std::shared_ptr<Backend> make_cuda_backend(const CudaOptions& options);

// A card that the CUDA backend could use.
struct CudaDevice {
  std::string name;
  int64_t total_bytes = 0, free_bytes = 0;
  int capability = 0;  // 90: sm_90
  // As its data sheet has them, at the highest clocks: memory, and products of 16-bit numbers on tensor cores, summed in fp32.
  double bytes_per_second = 0, flops_per_second = 0;
};
// Empty where there is no library, driver or card; `why` then says which, if given.
std::vector<CudaDevice> cuda_devices(std::string* why = nullptr);

// Plain loops in double precision: the oracle of all op tests, never used in production.
std::shared_ptr<Backend> make_reference_backend();

}  // namespace maga
