// What each op must move and compute for a given batch, hence the least time a device can need.
#pragma once

#include <span>
#include <vector>

#include "program/program.h"

namespace maga {

// What one sequence brings to a step.
struct SequenceWork {
  int64_t tokens = 1;
  int64_t context = 0;  // K/V entries that it has before them
};

struct Workload {
  std::span<const SequenceWork> sequences;
  int64_t logit_rows = 1;            // rows of the head, over all sequences
  std::span<const DType> kv_dtypes;  // of keys and values: one for all cache layers, or each layer's
};

struct OpCost {
  double flops = 0;
  double weight_bytes = 0;  // read once a step, however many tokens
  double kv_bytes = 0;      // keys and values read and written
};

// One entry an op. `weight_bytes[w]` is the stored size of weight w (packed, not fp32).
std::vector<OpCost> cost(const Program& program, const Workload& work, const std::vector<double>& weight_bytes);
void cost(const Program& program, const Workload& work, const std::vector<double>& weight_bytes, std::vector<OpCost>* costs);

// What a device reaches at best; 0: unknown.
struct Rates {
  double bytes_per_second = 0;
  double flops_per_second = 0;
};

// Least times of a step. An op takes as long as its bytes or its arithmetic, whichever is slower.
struct LeastSeconds {
  double all = 0;
  double weights = 0, kv = 0, arithmetic = 0;  // each by itself; together they are more than `all`
};
LeastSeconds least_seconds(std::span<const OpCost> costs, const Rates& rates);

}  // namespace maga
