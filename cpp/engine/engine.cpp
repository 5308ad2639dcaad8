// The doors to the loop. One short mutex guards what crosses between threads; the loop's thread holds it only to swap.
#include "engine/engine.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <iterator>
#include <limits>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "core/check.h"
#include "core/threads.h"
#include "engine/loop.h"

namespace maga {
namespace {

constexpr auto kRetry = std::chrono::milliseconds(10);  // when news could not be handed over

struct Cancellation {
  uint64_t request = 0;
  int32_t sequence = -1;
};

void check_options(const EngineOptions& options, const Executable& model) {
  const Limits& limits = model.limits();
  const int64_t most = std::min(limits.sequences, limits.logit_rows);
  MAGA_REQUIRE(options.max_sequences >= 1 && options.max_sequences <= most, "max_sequences is ", options.max_sequences,
               ": it must be in [1, ", most, "], the rows that the model was loaded for");
  MAGA_REQUIRE(options.token_budget >= options.max_sequences && options.token_budget <= limits.tokens, "token_budget is ",
               options.token_budget, ": it must be in [max_sequences, ", limits.tokens, "], and max_sequences is ",
               options.max_sequences);
  MAGA_REQUIRE(options.max_queue >= 1, "max_queue is ", options.max_queue, ": it must be at least 1");
  MAGA_REQUIRE(options.max_sequence_length >= 0, "max_sequence_length is ", options.max_sequence_length,
               ": it must be 0 (the model's) or above");
  const Program& program = model.program();
  for (const int32_t token : options.prefix)
    MAGA_REQUIRE(token >= program.vocab && (options.prefix_in_pages || token < program.vocab + program.virtual_tokens),
                 "the prefix has the token id ", token, ": ids must be in [", program.vocab, ", ",
                 program.vocab + program.virtual_tokens, "), those of virtual tokens");
  MAGA_REQUIRE(limits.pages >= 1 && limits.page_tokens >= 1, "the K/V cache has ", limits.pages, " pages of ", limits.page_tokens,
               " tokens: it needs at least one");
  const auto prefix = static_cast<int64_t>(options.prefix.size());
  MAGA_REQUIRE(prefix == 0 || (!program.embeds && prefix + 1 < longest_sequence(options, model)), "a prefix of ", prefix,
               " tokens leaves no room for a prompt and its answer");
}

}  // namespace

struct Engine::State {
  State(std::shared_ptr<Backend> backend, std::unique_ptr<Executable> model, const EngineOptions& given)
      : options(given),
        vocab(model->program().vocab),
        length_dependent_from(model->program().length_dependent_from()),
        long_from(model->program().long_from()),
        context(model->program().context),
        whole_prompts(model->program().whole_prompts()),
        embeds(model->program().embeds),
        row_per_token(model->program().row_per_token),
        has_hidden(static_cast<bool>(hidden_state(model->program()))),
        limits(model->limits()),
        longest(longest_sequence(given, *model)),
        loop(std::move(backend), std::move(model), given),
        event_fd(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    MAGA_CHECK(event_fd >= 0, "eventfd failed");
    published = loop.stats();
    thread = std::thread([this] { run(); });
  }

  ~State() {
    {
      std::lock_guard lock(mutex);
      stopping = true;
    }
    wake.notify_one();
    loop.masks()->close();
    thread.join();
    close(event_fd);
  }

  // What no step answers for ends the loop: every request gets its end, and the doors are closed.
  void run() {
    name_thread("maga-engine");
    try {
      while (turn()) continue;
    } catch (const std::exception& error) {
      lose(error.what());
    }
  }

  // Returns whether another one follows.
  bool turn() {
    {
      loop.phase = "wait";
      std::unique_lock lock(mutex);
      const auto has_work = [&] { return stopping || !loop.idle() || !inbox.empty() || !cancelled.empty(); };
      if (loop.news.events.empty())
        wake.wait(lock, has_work);
      else
        wake.wait_for(lock, kRetry, has_work);
      inbox.swap(requests);
      cancelled.swap(cancellations);
      for (const auto& request : requests) published.waiting += request->request.sequences;
      if (stopping) cancel_everything = true;
    }
    loop.act(Fault::Place::loop);
    loop.phase = "admit";
    for (auto& request : requests) loop.add(std::exchange(request, nullptr));
    for (const auto& [request, sequence] : cancellations) loop.cancel(request, sequence);
    requests.clear();
    cancellations.clear();
    if (cancel_everything) loop.cancel_all();
    if (!loop.idle()) loop.step();
    publish();
    return !cancel_everything;
  }

  // Hands the news over. The eventfd is written only when the outbox was empty: at most once a step. Should it fail, the next turn
  // tries again.
  void publish() {
    bool all_ended = false;
    loop.phase = "emit";
    const EngineStats& stats = loop.stats();
    try {
      loop.act(Fault::Place::emit);
      std::lock_guard lock(mutex);
      const bool wake_poller = outbox.empty() && !loop.news.events.empty();
      outbox.insert(outbox.end(), std::make_move_iterator(loop.news.events.begin()),
                    std::make_move_iterator(loop.news.events.end()));
      if (wake_poller) eventfd_write(event_fd, 1);
      ended = loop.news.ended;
      all_ended = ended == accepted;
      published = stats;
    } catch (const std::exception&) {
      return;
    }
    loop.news.events.clear();
    if (all_ended) drained.notify_all();
  }

  void lose(const std::string& error) {
    lost_because = concat("the engine has failed: ", error, " (restart the server)");
    {
      std::lock_guard lock(mutex);
      lost = true;
      std::move(inbox.begin(), inbox.end(), std::back_inserter(requests));
      inbox.clear();
    }
    for (auto& request : requests)
      if (request) loop.add(std::move(request));
    loop.abandon(lost_because);
    publish();
  }

  void check(const Request& request) const {
    const int64_t prompt = static_cast<int64_t>(request.prompt.size());
    MAGA_REQUIRE(prompt >= 1, "the prompt is empty: it must have at least one token");
    MAGA_REQUIRE(!whole_prompts || prompt <= options.token_budget, "the prompt has ", prompt,
                 " tokens: this model must see all of a prompt in one step, and a step carries at most ", options.token_budget,
                 " (max_num_batched_tokens)");
    MAGA_REQUIRE(!embeds || request.sequences == 1, "sequences is ", request.sequences, ": an embedding has one");
    MAGA_REQUIRE(!embeds || request.grammar == 0, "an embedding has no grammar");
    const int64_t prefix = static_cast<int64_t>(options.prefix.size()), room = longest - prefix + embeds;
    MAGA_REQUIRE(prompt < room, "the prompt has ", prompt, " tokens: it must have fewer than ", room,
                 ", the longest sequence (max_sequence_length, and what fits into the K/V cache of ", limits.pages, " pages of ",
                 limits.page_tokens, " tokens)");
    for (const int32_t token : request.prompt)
      MAGA_REQUIRE(token >= 0 && token < vocab, "the prompt has the token id ", token, ": ids must be in [0, ", vocab, ")");
    if (context.end != kNone) {
      const int64_t part = place_of(context.end, request.prompt);
      MAGA_REQUIRE(part >= 0, "the prompt has no token ", context.end,
                   ", which must stand behind the part that is read as a whole");
      const int64_t most = options.token_budget - options.max_sequences - (options.prefix_in_pages ? 0 : prefix);
      MAGA_REQUIRE(part <= most, "the prompt has ", part, " tokens before its answer, which are read as a whole: at most ", most,
                   " fit into a step (token_budget less max_sequences and prefix)");
    }
    const SamplingParams& params = request.params;
    params.validate(vocab);
    MAGA_REQUIRE(params.prompt_logprobs < 0 || !(embeds || whole_prompts || context.whole || context.end != kNone),
                 "prompt_logprobs is ", params.prompt_logprobs, ": this model reads a prompt as a whole, so it has none");
    MAGA_REQUIRE(!params.return_hidden_states || has_hidden, "return_hidden_states is true: this model has none to return");
    MAGA_REQUIRE(request.sequences >= 1 && request.sequences <= options.max_sequences, "sequences is ", request.sequences,
                 ": it must be in [1, ", options.max_sequences, "], and the upper end is max_sequences");
    const int width = params.beams.width;
    MAGA_REQUIRE(width == 0 || request.grammar == 0, "a beam search has no grammar");
    MAGA_REQUIRE(width == 0 || (request.sequences <= width && width <= options.max_sequences), "beam width is ", width,
                 ": it must be in [", request.sequences, ", ", options.max_sequences, "], the outputs wanted and max_sequences");
    MAGA_REQUIRE(request.timeout_seconds >= 0 && request.timeout_seconds < 1e9, "timeout_seconds is ", request.timeout_seconds,
                 ": it must be in [0, 1e9), and 0 means none");
  }

  // Of the first such token; -1: there is none.
  static int64_t place_of(int32_t token, const std::vector<int32_t>& prompt) {
    const auto at = std::find(prompt.begin(), prompt.end(), token);
    return at == prompt.end() ? -1 : at - prompt.begin();
  }

  std::shared_ptr<AcceptedRequest> accept(Request request) const {
    auto accepted = std::make_shared<AcceptedRequest>();
    accepted->prefix = static_cast<int64_t>(options.prefix.size());
    request.prompt.insert(request.prompt.begin(), options.prefix.begin(), options.prefix.end());
    const int64_t prompt = static_cast<int64_t>(request.prompt.size());
    const int64_t unplaced = accepted->unplaced = options.prefix_has_positions ? 0 : accepted->prefix;
    // From some length on (dynamic rope) the keys of a prompt depend on its length, so only prompts of the same length share pages;
    // those of output tokens from there on depend on their own position too, and are not shared at all.
    const bool by_length = length_dependent_from > 0 && prompt - unplaced >= length_dependent_from;
    accepted->salt = concat(by_length ? prompt : 0, ":", request.cache_salt);
    accepted->long_salt = concat("long:", request.cache_salt);
    accepted->long_from = long_from;
    accepted->cacheable_tokens =
        length_dependent_from > 0 ? std::max(prompt, unplaced + length_dependent_from - 1) : std::numeric_limits<int64_t>::max();
    if (context.whole) accepted->context = prompt;
    if (context.end != kNone) {
      accepted->context = place_of(context.end, request.prompt);
      for (const int32_t held : context.held)
        if (const int64_t place = place_of(held, request.prompt); place >= 0) {
          accepted->held_position = place - unplaced;
          break;
        }
    }
    accepted->row_per_token = row_per_token;
    accepted->whole_tokens = whole_prompts ? prompt : accepted->context;
    if (accepted->whole_tokens > 0) accepted->cacheable_tokens = 0;  // the keys of a prompt depend on all of it
    accepted->submitted = Clock::now();
    if (request.timeout_seconds > 0)
      accepted->deadline =
          accepted->submitted + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(request.timeout_seconds));
    const SamplingParams& params = request.params;
    if (params.beams.width > 0)
      accepted->beams = std::make_unique<BeamSearch>(params, std::min<int64_t>(params.max_new_tokens, longest - prompt));
    accepted->request = std::move(request);
    return accepted;
  }

  const EngineOptions options;
  const int64_t vocab;
  const int64_t length_dependent_from, long_from;
  const ContextRule context;
  const bool whole_prompts, embeds, row_per_token, has_hidden;
  const Limits limits;
  const int64_t longest;
  // Of the loop's thread.
  Loop loop;
  std::vector<std::shared_ptr<AcceptedRequest>> requests;
  std::vector<Cancellation> cancellations;
  bool cancel_everything = false;
  std::string lost_because;  // written before `lost`, and never again

  const int event_fd;

  mutable std::mutex mutex;  // guards what follows
  std::condition_variable wake, drained;
  std::vector<std::shared_ptr<AcceptedRequest>> inbox;
  std::vector<Cancellation> cancelled;
  std::vector<Event> outbox;
  std::shared_ptr<const Vocabulary> vocabulary;
  EngineStats published;
  std::mt19937_64 seeds{std::random_device{}()};
  int64_t accepted = 0;  // requests since start; the last one's id
  int64_t ended = 0;     // of them, those whose last event is in the outbox
  bool draining = false, stopping = false, lost = false;
  std::thread thread;
};

Engine::Engine(std::shared_ptr<Backend> backend, std::unique_ptr<Executable> model, const EngineOptions& options) {
  MAGA_REQUIRE(backend && model, "the engine needs a backend and a model");
  check_options(options, *model);
  state_ = std::make_unique<State>(std::move(backend), std::move(model), options);
}

Engine::~Engine() = default;

void Engine::set_vocabulary(std::vector<std::string> token_bytes) {
  auto vocabulary = std::make_shared<const Vocabulary>(token_bytes);
  std::lock_guard lock(state_->mutex);
  state_->vocabulary = std::move(vocabulary);
}

uint64_t Engine::submit(Request request) {
  State& state = *state_;
  state.check(request);
  auto accepted = state.accept(std::move(request));
  const SamplingParams& params = accepted->request.params;
  {
    std::lock_guard lock(state.mutex);
    MAGA_REQUIRE(params.stop_strings.empty() || state.vocabulary, "stop_strings cannot be used: the engine has no vocabulary");
    if (state.lost) throw Error(ErrorKind::internal, state.lost_because);
    if (state.draining) throw Error(ErrorKind::busy, "the engine is draining: it takes no new requests");
    const int64_t queued = state.accepted - state.loop.news.started.load(std::memory_order_relaxed);
    if (queued >= state.options.max_queue)
      throw Error(ErrorKind::busy, concat("the queue is full: ", queued, " requests wait (max_queue)"));
    accepted->id = static_cast<uint64_t>(++state.accepted);
    accepted->seed = params.seed ? *params.seed : state.seeds();
    accepted->vocabulary = state.vocabulary;
    state.inbox.push_back(accepted);
  }
  state.wake.notify_one();
  return accepted->id;
}

void Engine::cancel(uint64_t request, int32_t sequence) {
  {
    std::lock_guard lock(state_->mutex);
    if (state_->lost) return;
    state_->cancelled.push_back({request, sequence});
  }
  state_->wake.notify_one();
}

std::vector<Event> Engine::poll() {
  std::vector<Event> events;
  std::lock_guard lock(state_->mutex);
  eventfd_t count = 0;
  eventfd_read(state_->event_fd, &count);
  events.swap(state_->outbox);
  return events;
}

int Engine::event_fd() const { return state_->event_fd; }

std::shared_ptr<MaskQueue> Engine::masks() const { return state_->loop.masks(); }

bool Engine::drain(double timeout_seconds) {
  std::unique_lock lock(state_->mutex);
  state_->draining = true;
  return state_->drained.wait_for(lock, std::chrono::duration<double>(std::clamp(timeout_seconds, 0.0, 1e9)),
                                  [&] { return state_->ended == state_->accepted; });
}

EngineStats Engine::stats() const {
  std::lock_guard lock(state_->mutex);
  EngineStats stats = state_->published;
  for (const auto& request : state_->inbox) stats.waiting += request->request.sequences;
  stats.requests = static_cast<uint64_t>(state_->accepted);
  stats.phase = state_->loop.phase;
  return stats;
}

}  // namespace maga
