// A model as data: values, weights and a flat list of ops. Python builds it once, C++ runs it every step.
#pragma once

#include <string>
#include <vector>

#include "core/codes.h"
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
  bool by_block = false;        // turns by Step::block_positions, not by positions
  // What changes for lengths above `max_positions`: nothing, or one of these three.
  // The base `theta` grows with the length by dynamic_factor (dynamic NTK; 0: it does not).
  float theta = 0, dynamic_factor = 0;
  // It grows with the length of the prompt, by powers of two (Qwen's NTK), and not with what follows.
  bool stepped = false;
  // Other frequencies (longrope).
  std::vector<float> long_inv_freq;  // (rotary_dim / 2) or empty
  int64_t max_positions = 0;

  bool by_length() const { return dynamic_factor != 0 || stepped || !long_inv_freq.empty(); }
};

// What one attention layer keeps per token: kv_heads keys of head_dim and kv_heads values of v_dim. In pages of 8-bit codes each of
// them has a scale, a bf16 number, of its own, unless the layer states one for all keys or values in fp8_e4m3 (0: it does not).
struct CacheLayer {
  int64_t kv_heads = 0, head_dim = 0, v_dim = 0;
  bool values_in_keys = false;  // a value is the first v_dim elements of its key, and is kept nowhere else (latent attention)
  float k_scale = 0, v_scale = 0;

  // Of one token with elements of this type, scales included.
  int64_t entry_bytes(DType type) const {
    return kv_heads * ((head_dim + (values_in_keys ? 0 : v_dim)) * size_of(type) + (is_code(type) ? 4 : 0));
  }
};

// Prompts with a first part that is read in both directions: all of an encoder's, or a part (ChatGLM-6B). The positions of its
// tokens count, and their block positions are 0; those behind it have the position of the token that `held` names, and block
// positions from 1 on.
struct ContextRule {
  bool whole = false;         // the part is all of the prompt
  int32_t end = kNone;        // the part ends before the first token of this id; kNone: there is no such part
  std::vector<int32_t> held;  // the first of these ids that the prompt has
};

struct Program {
  std::string family;
  int64_t vocab = 0;
  int64_t virtual_tokens = 0;  // ids behind the vocabulary: tuned embeddings, which no text has and no logit stands for
  int64_t max_positions = 0;
  std::vector<Value> values;
  std::vector<WeightSpec> weights;
  std::vector<RopeTable> rope_tables;
  std::vector<std::vector<float>> alibi_slopes;  // (tables) (heads)
  std::vector<std::vector<float>> corrections;   // (tables) (experts), see Routing; small differences count, so they stay fp32
  std::vector<CacheLayer> cache_layers;
  ContextRule context;
  std::vector<Op> ops;
  std::vector<ValueId> inputs;   // written from outside before a run (op tests, embeddings)
  std::vector<ValueId> outputs;  // kept readable after a run, besides `logits`
  ValueId logits = kNone;        // Rows::logits; width vocab, unless `embeds`
  bool embeds = false;           // `logits` are no logits but an embedding of the prompt, or scores of it
  bool row_per_token = false;    // such a program wants rows for all tokens of a prompt, not for its last

  // Gives every Embed the rows of `table`, (virtual_tokens, width), for the ids behind the vocabulary.
  void add_virtual_tokens(WeightId table);

  // Checks every op's widths, weights and order (no value is read before it is written); throws Error naming the op.
  void validate() const;

  // Whether keys depend on the length of the prompt (dynamic rope), and from which length on; 0: never.
  int64_t length_dependent_from() const;
  // From which length on all keys of a sequence are other ones (longrope); 0: never.
  int64_t long_from() const;
  // Positions that the tables of learned positions have rows for; 0: there are no such tables.
  int64_t table_positions() const;

  // Whether one step must bring all of a prompt: it is read in both directions, or pooled, or its tokens' rows belong
  // together.
  bool whole_prompts() const;
  // Columns of `logits`; 0 without.
  int64_t logits_width() const { return logits == kNone ? 0 : values[logits].width; }
};

}  // namespace maga
