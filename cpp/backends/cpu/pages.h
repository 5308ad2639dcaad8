// The memory of the K/V pages. A page holds its tokens' keys and values in all layers, contiguous:
//   layer, KV head, block of 16 tokens: keys (head_dim, 16), then values (16, v_dim) unless they are in the keys, then their
//   scales, if they are 8-bit codes.
#pragma once

#include <vector>

#include "backends/backend.h"
#include "backends/cpu/mapping.h"
#include "backends/cpu/row_kernels.h"

namespace maga::cpu {

class KvPages {
 public:
  KvPages(const Program& program, const Limits& limits);

  int64_t page_bytes() const { return page_bytes_; }
  const KvLayer& layer(int32_t index) const { return layers_[index]; }
  void copy(int32_t from, int32_t to);

 private:
  int64_t pages_, page_bytes_;
  Mapping memory_;
  std::vector<KvLayer> layers_;
};

}  // namespace maga::cpu
