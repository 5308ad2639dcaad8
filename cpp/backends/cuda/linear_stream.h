// Streaming linears for 1 to 64 tokens on Hopper, of bf16 and fp16, with weights of the same or of e4m3: which kernel a call gets,
// and its launch.
//
// Weights are the 64-row side of wgmma, tokens its narrow side, padded to 8, 16, 32 or 64; both arrive by tensor copies in a ring
// in shared memory. A CTA streams `rows` rows of the weight over its share of k. Where that leaves SMs idle, k is split, and the
// next kernel adds up the parts.
#pragma once

#include <cuda.h>

#include <vector>

#include "backends/cuda/linear.h"

namespace maga::cuda {

struct StreamShape {
  int m = 0;
  int rows = 0;  // of the weight; gated: 2 n
  int k = 0;
  bool may_split = false;
  int sms = 0;
  bool fp8 = false;  // e4m3 weights
};

// What is compiled, for each type and number of padded tokens.
struct StreamTile {
  int rows;    // of the weight, a CTA
  int groups;  // warpgroups
  int boxes;   // of 128 bytes of columns, a ring step
};
constexpr StreamTile kStreamTiles[] = {{32, 1, 2},  {48, 1, 2},  {64, 1, 2},  {96, 1, 1},
                                       {128, 2, 1}, {192, 2, 1}, {224, 2, 1}, {256, 2, 1}};

struct StreamConfig {
  StreamTile tile;
  int tokens;  // padded
  int split;   // of k
  int ctas;    // a slice of k; CTA i takes row tiles i, i + ctas, ...
  int stages;  // ring steps in shared memory
  int window;  // ring steps under way at once, see linear_stream_choose.cpp
};

constexpr int kStreamMostShared = 232448;  // bytes a CTA may have
constexpr int kStreamHeader = 1024;        // barriers, 32 bytes a stage
constexpr int kMostStages = kStreamHeader / 32;

constexpr int stream_step_bytes(const StreamTile& tile, int tokens) { return (tile.rows + tokens) * 128 * tile.boxes; }
// The warpgroups' 64-row tiles may reach past the rows of a CTA, into bytes whose products nobody stores: past the ring's end too.
constexpr int stream_slack_bytes(const StreamTile& tile) {
  return (64 * tile.groups - 1 - (tile.rows - 1) % (64 * tile.groups)) * 128;
}
// Of an e4m3 linear: the scales of a step's tokens.
constexpr int stream_scale_bytes(const StreamTile& tile, int tokens, bool fp8) { return fp8 ? tokens * 4 * tile.boxes : 0; }
constexpr int stream_shared_bytes(const StreamTile& tile, int tokens, int stages, bool fp8) {
  return 1024 + kStreamHeader + stream_slack_bytes(tile) +  // 1024: to align
         stages * (stream_step_bytes(tile, tokens) + stream_scale_bytes(tile, tokens, fp8));
}
// Whether a kernel of e4m3 weights rounds the tokens itself, in every CTA; more of them are rounded before, once.
constexpr bool stream_rounds(int tokens) { return tokens <= 16; }
constexpr int kRoundingWarps = 3;  // bring tokens and round them
// What is compiled of e4m3 linears: the smaller the tile, the more often the same tokens are rounded.
constexpr bool stream_has_fp8(const StreamTile& tile, int tokens) {
  return !stream_rounds(tokens) || (tile.rows >= 64 && tile.rows != 96);
}
// CTAs for which an SM has registers.
constexpr int stream_fp8_ctas(const StreamTile& tile, int tokens) {
  return stream_rounds(tokens) || (tile.groups == 1 && tile.rows <= 64) ? 2 : 1;
}
constexpr int stream_threads(const StreamTile& tile, int tokens, bool fp8) {
  return 128 * tile.groups + 32 + 32 * (fp8 && stream_rounds(tokens) ? kRoundingWarps : 1);
}

StreamConfig choose_stream(const StreamShape& shape);
// All that make sense, for the benchmark to compare with the choice.
std::vector<StreamConfig> stream_configs(const StreamShape& shape);

class Streams {
 public:
  Streams();
  // Whether there is a streaming kernel for this call on this device.
  bool takes(const LinearArgs& args) const;
  StreamShape shape_of(const LinearArgs& args) const;
  // Of e4m3 weights: rounds tokens into args.widened first, unless stream_rounds(config.tokens).
  void run(const Queue& queue, const LinearArgs& args, const StreamConfig& config);

 private:
  int sms_ = 0;
  bool hopper_ = false;
  std::vector<const void*> raised_;  // kernels allowed their shared memory
};

}  // namespace maga::cuda
