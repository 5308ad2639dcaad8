// A model as data: values, weights and a flat list of ops. Python builds it once, C++ runs it every step.
#pragma once

#include <string>
#include <vector>

#include "core/dtype.h"
#include "program/ops.h"

namespace maga {

enum class Rows : uint8_t { tokens, logits };  // a row per token, or per row that needs logits

struct Value {
  std::string name;
  int64_t width = 0;
  Rows rows = Rows::tokens;
};

// One parameter of the program. `sources` are rows of the checkpoint's tensors (checkpoint/source.py), concatenated along dim 0;
// those of a stack of matrices are divided among the matrices in order, as many for each.
struct WeightSpec {
  std::string name;
  std::vector<std::string> sources;
  std::vector<int64_t> shape;  // (rows, cols), (n), or (matrices, rows, cols)
};

// Rotation frequencies, shared by the layers that use them.
struct RopeTable {
  int64_t rotary_dim = 0;
  bool interleaved = false;     // pairs (2j, 2j+1) instead of (j, j + rotary_dim / 2)
  std::vector<float> inv_freq;  // (rotary_dim / 2)
  float multiplier = 1;         // on cos and sin (yarn)
  // Dynamic NTK: for lengths above `max_positions` the base grows with the length. factor 0: off.
  float theta = 0, dynamic_factor = 0;
  int64_t max_positions = 0;
};

// What one attention layer keeps per token: kv_heads keys of head_dim and kv_heads values of v_dim.
struct CacheLayer {
  int64_t kv_heads = 0, head_dim = 0, v_dim = 0;
};

struct Program {
  std::string family;
  int64_t vocab = 0;
  int64_t max_positions = 0;
  std::vector<Value> values;
  std::vector<WeightSpec> weights;
  std::vector<RopeTable> rope_tables;
  std::vector<std::vector<float>> alibi_slopes;  // (tables) (heads)
  std::vector<std::vector<float>> corrections;   // (tables) (experts), see Routing; small differences count, so they stay fp32
  std::vector<CacheLayer> cache_layers;
  std::vector<Op> ops;
  std::vector<ValueId> inputs;   // written from outside before a run (op tests, embeddings)
  std::vector<ValueId> outputs;  // kept readable after a run, besides `logits`
  ValueId logits = kNone;        // Rows::logits, width vocab

  // Checks every op's widths, weights and order (no value is read before it is written); throws Error naming the op.
  void validate() const;

  // Whether keys depend on the length of the prompt (dynamic rope), and from which length on; 0: never.
  int64_t length_dependent_from() const;
};

}  // namespace maga
