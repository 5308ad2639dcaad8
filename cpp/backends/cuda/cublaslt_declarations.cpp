// Compares the declarations of cublaslt.h with cuBLASLt's own, where its header is installed.
#include "backends/cuda/cublaslt.h"

#if __has_include(<cublasLt.h>)
#include <cublasLt.h>

namespace maga::cuda::lt {

// Handles and enums go by their size: a pointer is a pointer, an enum an int.
template <typename Ours, typename Theirs>
constexpr bool kSameArgument = sizeof(Ours) == sizeof(Theirs) && std::is_pointer_v<Ours> == std::is_pointer_v<Theirs> &&
                               std::is_floating_point_v<Ours> == std::is_floating_point_v<Theirs>;

template <typename Ours, typename Theirs>
constexpr bool kSameFunction = false;
template <typename R, typename... P, typename S, typename... Q>
constexpr bool kSameFunction<R (*)(P...), S (*)(Q...)> = [] {
  if constexpr (sizeof...(P) == sizeof...(Q)) return kSameArgument<R, S> && (kSameArgument<P, Q> && ...);
  return false;
}();

#define SAME_FUNCTION(ours, theirs) static_assert(kSameFunction<decltype(Library::ours), decltype(&theirs)>)
SAME_FUNCTION(version, cublasLtGetVersion);
SAME_FUNCTION(status_name, cublasLtGetStatusName);
SAME_FUNCTION(create, cublasLtCreate);
SAME_FUNCTION(destroy, cublasLtDestroy);
SAME_FUNCTION(operation_create, cublasLtMatmulDescCreate);
SAME_FUNCTION(operation_destroy, cublasLtMatmulDescDestroy);
SAME_FUNCTION(operation_set, cublasLtMatmulDescSetAttribute);
SAME_FUNCTION(layout_create, cublasLtMatrixLayoutCreate);
SAME_FUNCTION(layout_destroy, cublasLtMatrixLayoutDestroy);
SAME_FUNCTION(layout_set, cublasLtMatrixLayoutSetAttribute);
SAME_FUNCTION(preference_create, cublasLtMatmulPreferenceCreate);
SAME_FUNCTION(preference_destroy, cublasLtMatmulPreferenceDestroy);
SAME_FUNCTION(preference_set, cublasLtMatmulPreferenceSetAttribute);
SAME_FUNCTION(candidates, cublasLtMatmulAlgoGetHeuristic);
SAME_FUNCTION(matmul, cublasLtMatmul);
#undef SAME_FUNCTION

static_assert(sizeof(Algorithm) == sizeof(cublasLtMatmulAlgo_t));
static_assert(sizeof(Candidate) == sizeof(cublasLtMatmulHeuristicResult_t));
static_assert(offsetof(Candidate, workspace_bytes) == offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize));
static_assert(offsetof(Candidate, status) == offsetof(cublasLtMatmulHeuristicResult_t, state));
static_assert(int{kSuccess} == CUBLAS_STATUS_SUCCESS);
static_assert(int{kCompute32F} == CUBLAS_COMPUTE_32F);
static_assert(int{kTransposeNo} == CUBLAS_OP_N && int{kTransposeYes} == CUBLAS_OP_T);
static_assert(int{kEpilogueNone} == CUBLASLT_EPILOGUE_DEFAULT && int{kEpilogueBias} == CUBLASLT_EPILOGUE_BIAS);
static_assert(int{kTransposeA} == CUBLASLT_MATMUL_DESC_TRANSA && int{kTransposeB} == CUBLASLT_MATMUL_DESC_TRANSB);
static_assert(int{kEpilogue} == CUBLASLT_MATMUL_DESC_EPILOGUE && int{kBiasPointer} == CUBLASLT_MATMUL_DESC_BIAS_POINTER);
static_assert(int{kColumns} == CUBLASLT_MATRIX_LAYOUT_COLS);
static_assert(int{kMaxWorkspace} == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
static_assert(int{kReductionSchemes} == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK);
static_assert(int{kAlignmentA} == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
static_assert(int{kAlignmentB} == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
static_assert(int{kAlignmentC} == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES);
static_assert(int{kAlignmentD} == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
static_assert(int{kReduceInComputeType} == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);

}  // namespace maga::cuda::lt
#endif
