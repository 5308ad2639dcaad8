// Kernels over rows of values: embed, positions, norm, rope, K/V write, activation, bound, add, select. `type` is the compute type
// of the program (f32, f16, bf16); arithmetic is fp32 inside. A row of a value: base + row * stride, in elements.
#pragma once

#include <limits>

#include "backends/cuda/device_step.h"
#include "backends/cuda/quantized_tokens.h"
#include "backends/cuda/queue.h"
#include "core/dtype.h"
#include "program/ops.h"

namespace maga::cuda {

struct Matrix {
  void* data = nullptr;
  int64_t stride = 0;
};

// Partial sums of a linear that some kernel left to the next: out = sum over slabs in order, then + bias, then + residual.
struct Slabs {
  const float* data = nullptr;  // (count, rows, width); null: none
  int count = 0;
  const void* bias = nullptr;  // (width) or null
};

// As Embed of program/ops.h, ids below 0 resolved through step.chosen.
struct EmbedArgs {
  const void* table = nullptr;          // (vocab, width)
  const void* virtual_table = nullptr;  // (virtual tokens, width)
  Matrix out;
  int vocab = std::numeric_limits<int>::max();  // ids from here on are virtual
  int width = 0;
  float scale = 1;
};
void embed(const Queue&, DType type, const DeviceStep&, const EmbedArgs&);

// As AddPositions of program/ops.h.
struct AddPositionsArgs {
  Matrix in, out;
  const void* table = nullptr;  // (positions / divisor + offset, width)
  int64_t offset = 0;
  int width = 0, divisor = 1;
};
void add_positions(const Queue&, DType type, const DeviceStep&, const AddPositionsArgs&);

// As LogScale of program/ops.h.
struct LogScaleArgs {
  Matrix x;
  int width = 0;
  int64_t from = 0;
};
void log_scale(const Queue&, DType type, const DeviceStep&, const LogScaleArgs&);

// As Norm of program/ops.h. With slabs (group == width only): sum = slabs + bias + residual is rounded to `type` and stored to
// `sum`, and what is normalised is that; `in` is not read.
struct NormArgs {
  Matrix in, out;
  int rows = 0, width = 0, group = 0;
  const void* weight = nullptr;
  const void* bias = nullptr;
  int own = 0;  // elements from a run's weight and bias to the next run's; 0: all runs share them
  NormKind kind = NormKind::rms;
  float eps = 0, weight_offset = 0;
  Slabs slabs = {};
  Matrix residual = {};  // null: none
  Matrix sum = {};
  QuantizedTokens rounded = {};  // the result once more, where norm_rounds() says that it can
};
constexpr int kMostRoundedColumns = 8192;
bool norm_rounds(DType type, const NormArgs&);
void norm(const Queue&, DType type, const NormArgs&);

// out = slabs + bias + residual, where no norm follows.
struct ReduceArgs {
  Slabs slabs;
  Matrix residual, out;
  int rows = 0, width = 0;
};
void reduce(const Queue&, DType type, const ReduceArgs&);

// A rope table's cosines and sines for the tokens of a step, computed once a step: turns (tokens, rotary_dim / 2) as (cos, sin),
// both times the table's multiplier. Angles are computed so that positions up to 10^6 keep fp32 accuracy.
struct RopeTableArgs {
  const float* inv_freq = nullptr;  // (rotary_dim / 2) device
  int rotary_dim = 0;
  float multiplier = 1;
  const int32_t* positions = nullptr;  // (tokens) device
  // What changes with the length, see program/program.h; long_inv_freq (rotary_dim / 2) device, or null
  float theta = 0, dynamic_factor = 0;
  bool stepped = false;
  const float* long_inv_freq = nullptr;
  int64_t max_positions = 0;
  float2* turns = nullptr;
};
void rope_turns(const Queue&, const DeviceStep&, const RopeTableArgs&);

struct RopeArgs {
  Matrix x;
  int rows = 0, heads = 0, head_dim = 0, rotary_dim = 0;
  bool interleaved = false;
  const float2* turns = nullptr;
};
void rope(const Queue&, DType type, const RopeArgs&);

// PrepareQkv of program/ops.h: takes q, k, v from their matrices, or, with slabs, from partial sums whose row is (q | k | v);
// norms, rotates, writes q to `q` and k, v into the pages. Also the plain K/V write of Attention: no norm, no turns, heads 0.
struct PrepareArgs {
  Matrix q = {}, k = {}, v = {};  // q is written back in place; with slabs only q.data is used, for the result
  Slabs slabs = {};
  int rows = 0, heads = 0, kv_heads = 0;
  const void* q_norm = nullptr;
  const void* k_norm = nullptr;
  float eps = 0, weight_offset = 0;
  int rotary_dim = 0;
  bool interleaved = false;
  const float2* turns = nullptr;  // null: no rope
  bool keep_k = false;            // k's result is written back in place too; not with slabs
  KvLayer layer;
  DType kv_type = DType::bf16;
};
void prepare_qkv(const Queue&, DType type, const DeviceStep&, const PrepareArgs&);

// out = act(gate) * up; without up: act(gate)
struct ActivationArgs {
  Matrix gate, up, out;
  int rows = 0, width = 0;
  ActivationKind kind = ActivationKind::silu;
};
void activation(const Queue&, DType type, const ActivationArgs&);

// As Bound of program/ops.h.
struct BoundArgs {
  Matrix in, out;
  int rows = 0, width = 0;
  BoundKind kind = BoundKind::clamp;
  float limit = 0;
};
void bound(const Queue&, DType type, const BoundArgs&);

struct AddArgs {
  Matrix a, b, out;
  int rows = 0, width = 0;
};
void add(const Queue&, DType type, const AddArgs&);

// out[r] = in[step.logit_rows[r]]
struct SelectArgs {
  Matrix in, out;
  int width = 0;
};
void select(const Queue&, DType type, const DeviceStep&, const SelectArgs&);

// As Pool of program/ops.h; `out` of `type` or, with out_f32, fp32.
struct PoolArgs {
  Matrix in, out;
  int width = 0;
  PoolKind kind = PoolKind::first;
  bool out_f32 = false;
};
void pool(const Queue&, DType type, const DeviceStep&, const PoolArgs&);

// (rows, width) of `type` from or to fp32, for reading and writing values by hand.
void widen(const Queue&, DType type, Matrix in, float* out, int64_t rows, int width);
void narrow(const Queue&, DType type, const float* in, Matrix out, int64_t rows, int width);

}  // namespace maga::cuda
