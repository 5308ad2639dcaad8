// What each op must move and compute for a given batch, hence the least time a device can need.
#pragma once

#include <vector>

#include "program/program.h"

namespace maga {

struct Workload {
  int64_t sequences = 1;
  int64_t tokens_per_sequence = 1;  // new tokens each sequence brings
  int64_t context = 0;              // K/V entries each sequence has before them
  int64_t logit_rows = 1;           // rows of the head, over all sequences
  int64_t kv_element_bytes = 2;
};

struct OpCost {
  double flops = 0;
  double weight_bytes = 0;  // read once a step, however many tokens
  double kv_bytes = 0;      // keys and values read and written
};

// One entry an op. `weight_bytes[w]` is the stored size of weight w (packed, not fp32).
std::vector<OpCost> cost(const Program& program, const Workload& work, const std::vector<double>& weight_bytes);

// Seconds that `total` needs at the given rates, whichever of memory and arithmetic takes longer.
double floor_seconds(const OpCost& total, double bytes_per_second, double flops_per_second);

}  // namespace maga
