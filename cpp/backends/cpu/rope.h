// Cosines and sines of a rope table, one row a position, computed when a position first comes up.
#pragma once

#include <vector>

#include "program/program.h"
#include "program/step.h"

namespace maga::cpu {

class RopeTurns {
 public:
  RopeTurns(const RopeTable& table, int64_t max_tokens);

  // Finds the row of each token; tokens() is valid until the next call. Row layout: see RopeRows.
  void prepare(const Step& step);
  const float* const* tokens() const { return tokens_.data(); }
  const RopeTable& table() const { return table_; }
  int64_t bytes() const { return static_cast<int64_t>((rows_.capacity() + stretched_.capacity()) * sizeof(float)); }

 private:
  void grow(int64_t positions);
  void fill(const float* inv_freq, int64_t position, float* row) const;
  void stretch(int64_t length);

  RopeTable table_;
  int64_t row_floats_;
  std::vector<float> rows_;  // (positions so far, row_floats)
  std::vector<const float*> tokens_;
  // Tables that change with the length: rows of this step's tokens whose length is above max_positions, and the frequencies for the
  // last such length.
  std::vector<float> stretched_;
  std::vector<float> stretched_freq_;
  int64_t stretched_length_ = 0;
};

}  // namespace maga::cpu
