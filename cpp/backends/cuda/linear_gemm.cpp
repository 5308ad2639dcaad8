#include "backends/cuda/linear_gemm.h"

#include <algorithm>
#include <vector>

#include "backends/cuda/cuda_check.h"
#include "backends/cuda/linear_finish.h"
#include "backends/cuda/linear_measure.h"

namespace maga::cuda {
namespace {

constexpr int kCandidates = 16;

cudaDataType_t cuda_type(DType type) { return type == DType::f32 ? CUDA_R_32F : type == DType::f16 ? CUDA_R_16F : CUDA_R_16BF; }

uint32_t alignment_of(const void* p) {
  const uintptr_t bits = reinterpret_cast<uintptr_t>(p) | 256;
  return static_cast<uint32_t>(bits & -bits);
}

}  // namespace

// For cuBLASLt, which counts column by column: outᵀ (n, m) = weightᵀᵀ (n, k) · xᵀ (k, m).
struct Gemms::Plan {
  explicit Plan(lt::Handle handle, const Key& key) {
    MAGA_CUBLASLT(operation_create(&operation, lt::kCompute32F, CUDA_R_32F));  // fp32 means fp32: no TF32
    const int yes = lt::kTransposeYes, epilogue = key.bias ? lt::kEpilogueBias : lt::kEpilogueNone;
    MAGA_CUBLASLT(operation_set(operation, lt::kTransposeA, &yes, sizeof yes));
    MAGA_CUBLASLT(operation_set(operation, lt::kEpilogue, &epilogue, sizeof epilogue));
    const cudaDataType_t in = cuda_type(key.type), out_type = cuda_type(key.out_type);
    MAGA_CUBLASLT(layout_create(&weight, in, key.k, key.n, key.k));
    MAGA_CUBLASLT(layout_create(&x, in, key.k, key.m, key.x_stride));
    MAGA_CUBLASLT(layout_create(&out, out_type, key.n, key.m, key.out_stride));
    MAGA_CUBLASLT(layout_create(&residual, out_type, key.n, key.m, key.residual ? key.residual_stride : key.out_stride));

    lt::Preference preference;
    MAGA_CUBLASLT(preference_create(&preference));
    const uint64_t workspace = kGemmWorkspaceBytes;
    const uint32_t schemes = lt::kReduceInComputeType;  // or none; both add in a fixed order
    MAGA_CUBLASLT(preference_set(preference, lt::kMaxWorkspace, &workspace, sizeof workspace));
    MAGA_CUBLASLT(preference_set(preference, lt::kReductionSchemes, &schemes, sizeof schemes));
    MAGA_CUBLASLT(preference_set(preference, lt::kAlignmentA, &key.weight_alignment, sizeof(uint32_t)));
    MAGA_CUBLASLT(preference_set(preference, lt::kAlignmentB, &key.x_alignment, sizeof(uint32_t)));
    MAGA_CUBLASLT(preference_set(preference, lt::kAlignmentC, &key.residual_alignment, sizeof(uint32_t)));
    MAGA_CUBLASLT(preference_set(preference, lt::kAlignmentD, &key.out_alignment, sizeof(uint32_t)));
    candidates.resize(worth_measuring(key.m) ? kCandidates : 1);
    int found = 0;
    const lt::Status status = lt::library().candidates(handle, operation, weight, x, residual, out, preference,
                                                       static_cast<int>(candidates.size()), candidates.data(), &found);
    candidates.resize(status == lt::kSuccess ? found : 0);
    std::erase_if(candidates, [](const lt::Candidate& c) { return c.status != lt::kSuccess; });
    MAGA_CUBLASLT(preference_destroy(preference));
    MAGA_CHECK(!candidates.empty(), "cuBLASLt has no algorithm for m ", key.m, ", n ", key.n, ", k ", key.k, " of ",
               name_of(key.type), ", strides ", key.x_stride, " and ", key.out_stride, ", alignments ", key.weight_alignment, ", ",
               key.x_alignment, ", ", key.out_alignment, ": ", lt::library().status_name(status));
    measured = candidates.size() == 1;
  }
  ~Plan() {
    lt::library().operation_destroy(operation);
    for (const lt::Layout layout : {weight, x, out, residual}) lt::library().layout_destroy(layout);
  }
  Plan(const Plan&) = delete;

  lt::Operation operation = nullptr;
  lt::Layout weight = nullptr, x = nullptr, out = nullptr, residual = nullptr;
  std::vector<lt::Candidate> candidates;  // the first is used
  bool measured = false;
};

Gemms::Gemms() { MAGA_CUBLASLT(create(&handle_)); }

Gemms::~Gemms() {
  plans_.clear();
  lt::library().destroy(handle_);
}

Gemms::Plan& Gemms::plan_of(const Key& key) {
  if (const auto found = plans_.find(key); found != plans_.end()) return found->second;
  return plans_.try_emplace(key, handle_, key).first->second;
}

lt::Status Gemms::multiply(cudaStream_t stream, Plan& plan, const LinearArgs& args, void* out, void* workspace) {
  if (args.bias) MAGA_CUBLASLT(operation_set(plan.operation, lt::kBiasPointer, &args.bias, sizeof args.bias));
  const float one = 1, keep = args.residual ? 1 : 0;
  const lt::Candidate& chosen = plan.candidates.front();
  return lt::library().matmul(handle_, plan.operation, &one, args.weight, plan.weight, args.x, plan.x, &keep,
                              args.residual ? args.residual : out, plan.residual, out, plan.out, &chosen.algorithm, workspace,
                              kGemmWorkspaceBytes, stream);
}

// Puts the fastest candidate first.
void Gemms::measure(cudaStream_t stream, Plan& plan, const LinearArgs& args, void* workspace) {
  plan.measured = true;
  // In place, a repetition would add to the result of the one before.
  const Temporary temporary(args.residual ? args.m * args.out_stride * size_of(args.out_type) : 0);
  void* const out = args.residual ? temporary.data : args.out;
  if (!out) return;  // no memory to spare: the order of the heuristic stands
  std::vector<lt::Candidate>& candidates = plan.candidates;
  const size_t fastest = stopwatch_.fastest(stream, workspace, kGemmWorkspaceBytes, candidates.size(), [&](size_t i) {
    std::swap(candidates[0], candidates[i]);
    const bool taken = multiply(stream, plan, args, out, workspace) == lt::kSuccess;
    std::swap(candidates[0], candidates[i]);
    return taken;
  });
  std::swap(candidates[0], candidates[fastest]);
}

void Gemms::run(const Queue& queue, const LinearArgs& args, void* workspace) {
  if (args.out_type != args.type && (args.bias || args.residual)) {  // of another type than the result: not cuBLASLt's case
    LinearArgs product = args;
    product.bias = product.residual = nullptr;
    run(queue, product, workspace);
    linear_finish(queue, args);
    return;
  }
  const Key key{.m = args.m,
                .n = args.n,
                .k = args.k,
                .type = args.type,
                .out_type = args.out_type,
                .bias = args.bias != nullptr,
                .residual = args.residual != nullptr,
                .x_stride = args.x_stride,
                .out_stride = args.out_stride,
                .residual_stride = args.residual ? args.residual_stride : 0,
                .weight_alignment = alignment_of(args.weight),
                .x_alignment = alignment_of(args.x),
                .out_alignment = alignment_of(args.out),
                .residual_alignment = args.residual ? alignment_of(args.residual) : alignment_of(args.out)};
  Plan& plan = plan_of(key);
  if (!plan.measured && !capturing(queue.stream)) measure(queue.stream, plan, args, workspace);
  const lt::Status status = multiply(queue.stream, plan, args, args.out, workspace);
  MAGA_CHECK(status == lt::kSuccess, "cuBLASLt: ", lt::library().status_name(status), ", m ", args.m, ", n ", args.n, ", k ",
             args.k, " of ", name_of(args.type));
}

}  // namespace maga::cuda
