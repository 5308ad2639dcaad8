// A request and its sequences inside the loop.
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cache/prefix.h"
#include "decode/sampler.h"
#include "decode/stop.h"
#include "engine/beams.h"
#include "engine/request.h"
#include "engine/token_mask.h"

namespace maga {

using Clock = std::chrono::steady_clock;

inline double seconds_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

// What the sequences of a request share.
struct AcceptedRequest {
  uint64_t id = 0;
  Request request;
  uint64_t seed = 0;
  int64_t prefix = 0;            // tokens of EngineOptions::prefix, with which the prompt begins
  int64_t unplaced = 0;          // of them, those without a position
  std::string salt, long_salt;   // of its pages in the prefix cache; the second while a sequence is long
  int64_t cacheable_tokens = 0;  // K/V entries up to here may enter the prefix cache
  int64_t whole_tokens = 0;      // see PlanSequence
  int64_t long_from = 0;         // as Program::long_from
  bool row_per_token = false;    // as Program::row_per_token
  // As ContextRule: tokens of the prompt that see each other, and the position of those behind them. They are computed in one step.
  int64_t context = 0, held_position = 0;
  std::shared_ptr<const Vocabulary> vocabulary;
  Clock::time_point submitted;
  Clock::time_point deadline = Clock::time_point::max();
  std::unique_ptr<BeamSearch> beams;  // of a beam search; null without. Written by the loop only

  // Written by the loop only.
  bool started = false;    // left the queue
  int32_t unfinished = 0;  // sequences
  bool cancelled = false, failed = false;
  int64_t cached_tokens = 0;
  double wait_seconds = 0;
};

// One output of a request. Until the prompt is computed the first output stands for all of them: `siblings` fork from it then.
struct Sequence {
  std::shared_ptr<AcceptedRequest> request;
  int32_t index = 0;              // which output of the request, and its random stream
  std::vector<int32_t> siblings;  // indices of the outputs that will fork from this one
  std::vector<int32_t> tokens;    // prompt and output
  bool is_long = false;           // its keys are those of long sequences

  int64_t computed = 0;          // tokens whose K/V entries are in `pages`, once the steps in flight have run
  std::vector<int32_t> pages;    // held, in order of K/V index
  PrefixCache::Position cached;  // how far its pages are in the prefix cache

  // Of the steps that are launched and not committed (one, or two for a moment; none when the backend is synchronous).
  int32_t in_flight = 0;  // how many it takes part in: it must not be destroyed
  int32_t pending = 0;    // tokens that they choose for it
  int32_t draw = -1;      // the draw of the newest one that chooses such a token

  TokenCounts counts;                  // only with penalties
  std::shared_ptr<TokenMask> allowed;  // of the next token; null without a grammar
  bool waits_for_mask = false;         // its mask came too late for a step: it takes part in none until the mask is there
  StopMatcher stop;
  float mirostat_mu = 0;

  // Of a beam: its log probability, and how it may go on once `chosen`. Then it waits for the request's other beams.
  float beam_score = 0;
  bool chosen = false;
  std::vector<Candidate> continuations;

  int64_t scored = 0;  // of the prompt, with the prefix before it: tokens whose row has told the next one's log probability
  int64_t steps = 0;
  double cumulative_logprob = 0;
  double first_token_seconds = 0;
  bool ended = false;  // to be removed from the queues
  bool over() const { return ended || (request->beams && request->beams->ended); }

  explicit Sequence(std::shared_ptr<AcceptedRequest> accepted)
      : request(std::move(accepted)), tokens(request->request.prompt), stop(request->request.params, request->vocabulary) {
    is_long = grows_long();
    scored = request->prefix;
    mirostat_mu = 2 * request->request.params.rare.mirostat_tau;
  }

  // Tokens of the prompt behind `scored` whose log probability is wanted and not told yet: the row of the one before each.
  int64_t unscored() const { return request->request.params.prompt_logprobs < 0 ? 0 : prompt_tokens() - 1 - scored; }
  int64_t known() const { return static_cast<int64_t>(tokens.size()); }
  int64_t coming() const { return known() + pending; }  // known once the steps in flight are committed
  // Whether the next token needs the keys of long sequences, and the keys so far are not.
  bool grows_long() const { return !is_long && request->long_from > 0 && coming() - request->unplaced >= request->long_from; }
  const std::string& salt() const { return is_long ? request->long_salt : request->salt; }
  int64_t prompt_tokens() const { return static_cast<int64_t>(request->request.prompt.size()); }
  int64_t output_tokens() const { return known() - prompt_tokens(); }
  std::span<const int32_t> output() const { return std::span(tokens).subspan(prompt_tokens()); }
  int32_t slots() const { return 1 + static_cast<int32_t>(siblings.size()); }  // rows of the batch it will take

  int32_t output_at(int32_t slot) const { return slot == 0 ? index : siblings[slot - 1]; }

  // What may be found for it in the prefix cache: never all of it, since at least one token must be computed to get logits.
  // Nor any token whose logits are wanted.
  std::span<const int32_t> matchable() const {
    const int64_t most = std::min(known() - 1, request->cacheable_tokens);
    return std::span(tokens).first(unscored() > 0 ? std::min(most, scored) : most);
  }

  // The order in which sequences run and, from the back, are preempted: by priority, then by arrival. A priority level is
  // worth a fixed number of later arrivals, so that nobody waits for ever behind a stream of better priorities.
  static constexpr int64_t kArrivalsPerPriority = 256;
  bool runs_before(const Sequence& other) const {
    const auto rank = [](const Sequence& s) {
      return static_cast<int64_t>(s.request->id) + s.request->request.priority * kArrivalsPerPriority;
    };
    if (rank(*this) != rank(other)) return rank(*this) < rank(other);
    if (request->id != other.request->id) return request->id < other.request->id;
    return index < other.index;
  }
};

}  // namespace maga
