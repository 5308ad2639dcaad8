// The part of cuBLASLt that we use, declared here and opened at run time: neither the build nor the library depends on it.
// cublaslt_declarations.cpp compares these declarations with the real header where there is one.
#pragma once

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace maga::cuda::lt {

using Status = int;
constexpr Status kSuccess = 0;

using Handle = struct HandleOpaque*;
using Operation = struct OperationOpaque*;
using Layout = struct LayoutOpaque*;
using Preference = struct PreferenceOpaque*;

struct Algorithm {
  uint64_t data[8];
};
struct Candidate {
  Algorithm algorithm;
  size_t workspace_bytes;
  Status status;
  float waves;
  int reserved[4];
};

enum Compute : int { kCompute32F = 68 };
enum Transpose : int { kTransposeNo = 0, kTransposeYes = 1 };
enum Epilogue : int { kEpilogueNone = 1, kEpilogueBias = 4 };
enum OperationAttribute : int { kTransposeA = 3, kTransposeB = 4, kEpilogue = 7, kBiasPointer = 8 };
enum LayoutAttribute : int { kColumns = 3 };
enum PreferenceAttribute : int {
  kMaxWorkspace = 1,
  kReductionSchemes = 3,
  kAlignmentA = 5,
  kAlignmentB = 6,
  kAlignmentC = 7,
  kAlignmentD = 8
};
enum ReductionScheme : int { kReduceInComputeType = 2 };

struct Library {
  size_t (*version)();
  const char* (*status_name)(Status);
  Status (*create)(Handle*);
  Status (*destroy)(Handle);
  Status (*operation_create)(Operation*, Compute, cudaDataType_t scale_type);
  Status (*operation_destroy)(Operation);
  Status (*operation_set)(Operation, OperationAttribute, const void* value, size_t bytes);
  Status (*layout_create)(Layout*, cudaDataType_t, uint64_t rows, uint64_t columns, int64_t stride);
  Status (*layout_destroy)(Layout);
  Status (*layout_set)(Layout, LayoutAttribute, const void* value, size_t bytes);
  Status (*preference_create)(Preference*);
  Status (*preference_destroy)(Preference);
  Status (*preference_set)(Preference, PreferenceAttribute, const void* value, size_t bytes);
  Status (*candidates)(Handle, Operation, Layout a, Layout b, Layout c, Layout d, Preference, int wanted, Candidate*, int* found);
  Status (*matmul)(Handle, Operation, const void* alpha, const void* a, Layout, const void* b, Layout, const void* beta,
                   const void* c, Layout, void* d, Layout, const Algorithm*, void* workspace, size_t workspace_bytes, cudaStream_t);
};

// Opened at the first call, which throws Error (ErrorKind::missing) when there is none, or one too old.
const Library& library();

// A folder to look in, before the usual ones; without effect once the library is open.
void add_library_folder(std::string folder);

}  // namespace maga::cuda::lt

// MAGA_CUBLASLT(lt.create(&handle)): a call that fails throws.
#define MAGA_CUBLASLT(call)                                                                                                   \
  do {                                                                                                                        \
    if (const ::maga::cuda::lt::Status status_ = ::maga::cuda::lt::library().call; status_ != ::maga::cuda::lt::kSuccess)     \
        [[unlikely]]                                                                                                          \
      throw ::maga::Error(::maga::ErrorKind::internal,                                                                        \
                          ::maga::concat("cuBLASLt: ", ::maga::cuda::lt::library().status_name(status_), " in ", #call, ", ", \
                                         __FILE__, ":", __LINE__));                                                           \
  } while (false)
