// Python's view of cpp/engine: requests going in, events coming out.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <limits>

#include "bindings/bind.h"
#include "core/check.h"
#include "engine/engine.h"

namespace py = pybind11;

namespace maga {
namespace {

constexpr const char* kFinishNames[] = {"", "stop", "length", "cancelled", "timeout", "error"};

// The destructor joins the loop's thread.
struct DeleteReleased {
  void operator()(Engine* engine) const {
    py::gil_scoped_release release;
    delete engine;
  }
};

std::vector<int32_t> token_ids(const py::array& array) {
  const char kind = array.dtype().kind();
  MAGA_REQUIRE(array.ndim() == 1 && (kind == 'i' || kind == 'u' || array.size() == 0),
               "the prompt must be a one-dimensional array of integers, not ", array.ndim(), "-dimensional of ",
               std::string(py::str(array.dtype())));
  const py::array_t<int64_t, py::array::c_style | py::array::forcecast> wide(array);
  std::vector<int32_t> ids(wide.size());
  for (py::ssize_t i = 0; i < wide.size(); ++i) {
    const int64_t id = wide.at(i);
    MAGA_REQUIRE(id >= 0 && id <= std::numeric_limits<int32_t>::max(), "the prompt has the token id ", id,
                 ": ids must be in the vocabulary");
    ids[i] = static_cast<int32_t>(id);
  }
  return ids;
}

py::array_t<float> row_of(const std::vector<float>& row) {
  return py::array_t<float>(static_cast<py::ssize_t>(row.size()), row.data());
}

SamplingParams make_params(const py::kwargs& fields) {
  py::object params = py::cast(SamplingParams{});
  for (const auto& [name, value] : fields) {
    if (!py::hasattr(params, name)) throw py::type_error(concat("SamplingParams has no field '", std::string(py::str(name)), "'"));
    try {
      py::setattr(params, name, value);
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_TypeError)) throw;
      throw Error(ErrorKind::invalid,
                  concat(std::string(py::str(name)), " is ", std::string(py::repr(value)), ": it has the wrong type"));
    }
  }
  return params.cast<SamplingParams>();
}

constexpr const char* kBeamStops[] = {"heuristic", "first", "never"};

BeamParams::Stop beam_stop(const std::string& name) {
  const auto at = std::find(std::begin(kBeamStops), std::end(kBeamStops), name);
  MAGA_REQUIRE(at != std::end(kBeamStops), "beam_stop is '", name, "': it must be heuristic, first or never");
  return static_cast<BeamParams::Stop>(at - std::begin(kBeamStops));
}

// The fields of a part are Python's fields of the whole.
template <typename Part, typename T>
void bind_field(py::class_<SamplingParams>& whole, Part SamplingParams::* part, const char* name, T Part::* field) {
  whole.def_property(
      name, [=](const SamplingParams& p) { return p.*part.*field; },
      [=](SamplingParams& p, T value) { p.*part.*field = std::move(value); });
}

void bind_rare(py::class_<SamplingParams>& params) {
  using R = RareSamplers;
  const auto field = [&](const char* name, auto member) { bind_field(params, &SamplingParams::rare, name, member); };
  field("top_a", &R::top_a);
  field("tfs", &R::tfs);
  field("typical_p", &R::typical_p);
  field("epsilon_cutoff", &R::epsilon_cutoff);
  field("eta_cutoff", &R::eta_cutoff);
  field("nsigma", &R::nsigma);
  field("dynatemp_min", &R::dynatemp_min);
  field("dynatemp_max", &R::dynatemp_max);
  field("dynatemp_exponent", &R::dynatemp_exponent);
  field("temperature_last", &R::temperature_last);
  field("smoothing_factor", &R::smoothing_factor);
  field("smoothing_curve", &R::smoothing_curve);
  field("skew", &R::skew);
  field("xtc_probability", &R::xtc_probability);
  field("xtc_threshold", &R::xtc_threshold);
  field("mirostat_mode", &R::mirostat_mode);
  field("mirostat_tau", &R::mirostat_tau);
  field("mirostat_eta", &R::mirostat_eta);
  field("no_repeat_ngram_size", &R::no_repeat_ngram_size);
  field("dry_multiplier", &R::dry_multiplier);
  field("dry_base", &R::dry_base);
  field("dry_allowed_length", &R::dry_allowed_length);
  field("dry_range", &R::dry_range);
  field("dry_breakers", &R::dry_breakers);
  field("token_bans", &R::token_bans);
  field("token_ban_ranges", &R::token_ban_ranges);
  field("allowed_tokens", &R::allowed_tokens);
  field("sampler_priority", &R::sampler_priority);
  bind_field(params, &SamplingParams::beams, "beam_width", &BeamParams::width);
  bind_field(params, &SamplingParams::beams, "length_penalty", &BeamParams::length_penalty);
  params.def_property(
      "beam_stop", [](const SamplingParams& p) { return kBeamStops[static_cast<int>(p.beams.stop)]; },
      [](SamplingParams& p, const std::string& name) { p.beams.stop = beam_stop(name); });
}

void bind_params(py::module_& m) {
  using P = SamplingParams;
  py::class_<P> params(m, "SamplingParams");
  bind_rare(params);
  params.def(py::init(&make_params))
      .def_readwrite("max_new_tokens", &P::max_new_tokens)
      .def_readwrite("min_new_tokens", &P::min_new_tokens)
      .def_readwrite("temperature", &P::temperature)
      .def_readwrite("top_k", &P::top_k)
      .def_readwrite("top_p", &P::top_p)
      .def_readwrite("min_p", &P::min_p)
      .def_readwrite("top_p_decay", &P::top_p_decay)
      .def_readwrite("top_p_min", &P::top_p_min)
      .def_readwrite("top_p_reset_ids", &P::top_p_reset_ids)
      .def_readwrite("repetition_penalty", &P::repetition_penalty)
      .def_readwrite("presence_penalty", &P::presence_penalty)
      .def_readwrite("frequency_penalty", &P::frequency_penalty)
      .def_readwrite("seed", &P::seed)
      .def_readwrite("logit_bias", &P::logit_bias)
      .def_readwrite("bad_words", &P::bad_words)
      .def_readwrite("stop_words", &P::stop_words)
      .def_property(
          "stop_strings", [](const P& p) { return std::vector<py::bytes>(p.stop_strings.begin(), p.stop_strings.end()); },
          [](P& p, std::vector<std::string> strings) { p.stop_strings = std::move(strings); })
      .def_readwrite("stop_token_ids", &P::stop_token_ids)
      .def_readwrite("logprobs", &P::logprobs)
      .def_readwrite("prompt_logprobs", &P::prompt_logprobs)
      .def_readwrite("return_logits", &P::return_logits)
      .def_readwrite("select_tokens", &P::select_tokens)
      .def_readwrite("return_hidden_states", &P::return_hidden_states)
      .def("validate", &P::validate, py::arg("vocab"));
}

void bind_event(py::module_& m) {
  py::class_<Event>(m, "Event")
      .def_readonly("request", &Event::request)
      .def_readonly("sequence", &Event::sequence)
      .def_readonly("tokens", &Event::tokens)
      .def_property_readonly("logprobs",
                             [](const Event& e) {
                               py::list all;
                               for (const auto& token : e.logprobs) all.append(py::make_tuple(token.logprob, token.top));
                               return all;
                             })
      .def_property_readonly("prompt_logprobs",
                             [](const Event& e) {
                               py::list all;
                               for (const auto& token : e.prompt_logprobs)
                                 all.append(py::make_tuple(token.logprob, token.rank, token.top));
                               return all;
                             })
      .def_property_readonly("logits", [](const Event& e) { return row_of(e.logits); })
      .def_property_readonly("hidden_states", [](const Event& e) { return row_of(e.hidden_states); })
      .def_property_readonly("finish", [](const Event& e) { return kFinishNames[static_cast<int>(e.finish)]; })
      .def_readonly("stop_token", &Event::stop_token)
      .def_readonly("stop_word", &Event::stop_word)
      .def_readonly("stop_string", &Event::stop_string)
      .def_readonly("error", &Event::error)
      .def_property_readonly("embedding", [](const Event& e) { return row_of(e.embedding); })
      .def_readonly("prompt_tokens", &Event::prompt_tokens)
      .def_readonly("cached_tokens", &Event::cached_tokens)
      .def_readonly("output_tokens", &Event::output_tokens)
      .def_readonly("steps", &Event::steps)
      .def_readonly("cumulative_logprob", &Event::cumulative_logprob)
      .def_readonly("wait_seconds", &Event::wait_seconds)
      .def_readonly("first_token_seconds", &Event::first_token_seconds)
      .def_readonly("total_seconds", &Event::total_seconds);
}

py::dict stats_dict(const EngineStats& s) {
  using namespace py::literals;
  return py::dict("waiting"_a = s.waiting, "running"_a = s.running, "pages_total"_a = s.pages_total, "pages_live"_a = s.pages_live,
                  "pages_cached"_a = s.pages_cached, "pages_free"_a = s.pages_free, "requests"_a = s.requests,
                  "finished"_a = s.finished, "cancelled"_a = s.cancelled, "failed"_a = s.failed, "preemptions"_a = s.preemptions,
                  "evictions"_a = s.evictions, "prompt_tokens"_a = s.prompt_tokens, "cached_tokens"_a = s.cached_tokens,
                  "output_tokens"_a = s.output_tokens, "steps"_a = s.steps, "model_seconds"_a = s.model_seconds,
                  "sample_seconds"_a = s.sample_seconds, "host_seconds"_a = s.host_seconds,
                  "overlapped_seconds"_a = s.overlapped_seconds, "least_seconds"_a = s.least.all,
                  "least_weights_seconds"_a = s.least.weights, "least_kv_seconds"_a = s.least.kv,
                  "least_arithmetic_seconds"_a = s.least.arithmetic, "last_step_unix"_a = s.last_step_unix,
                  "corrupted"_a = s.corrupted, "masks"_a = s.masks, "masks_late"_a = s.masks_late, "phase"_a = s.phase,
                  "device_lost"_a = s.device_lost, "loop_lost"_a = s.loop_lost);
}

}  // namespace

void bind_masks(py::module_& m) {
  using State = TokenMask::State;
  using Words = py::array_t<uint32_t, py::array::c_style>;
  py::class_<TokenMask, std::shared_ptr<TokenMask>>(m, "TokenMask")
      .def_readonly("grammar", &TokenMask::grammar)
      .def_readonly("output", &TokenMask::output)
      .def_readonly("last_token", &TokenMask::last_token);
  py::class_<MaskQueue, std::shared_ptr<MaskQueue>>(m, "MaskQueue")
      .def("take", &MaskQueue::take, py::call_guard<py::gil_scoped_release>())
      .def("close", &MaskQueue::close)
      .def(
          "ready",
          [](MaskQueue& queue, TokenMask& mask, const Words& allowed) {
            const auto words = std::min(mask.allowed.size(), static_cast<size_t>(allowed.size()));
            std::copy_n(allowed.data(), words, mask.allowed.begin());
            queue.finish(&mask, State::ready);
          },
          py::arg("mask"), py::arg("allowed"))
      .def(
          "complete", [](MaskQueue& queue, TokenMask& mask) { queue.finish(&mask, State::complete); }, py::arg("mask"))
      .def(
          "fail",
          [](MaskQueue& queue, TokenMask& mask, std::string error) { queue.finish(&mask, State::failed, std::move(error)); },
          py::arg("mask"), py::arg("error"));
}

void bind_engine(py::module_& m) {
  bind_params(m);
  bind_event(m);
  bind_masks(m);
  py::class_<Engine, std::unique_ptr<Engine, DeleteReleased>>(m, "Engine")
      .def(py::init([](std::shared_ptr<Backend> backend, std::unique_ptr<Executable> model, int max_sequences, int token_budget,
                       int max_queue, int64_t max_sequence_length, bool prefix_cache, std::string fault, double bytes_per_second,
                       double flops_per_second, std::vector<double> weight_bytes, std::vector<int32_t> prefix, bool prefix_in_pages,
                       bool prefix_has_positions) {
             return std::unique_ptr<Engine, DeleteReleased>(new Engine(std::move(backend), std::move(model),
                                                                       {.max_sequences = max_sequences,
                                                                        .token_budget = token_budget,
                                                                        .max_queue = max_queue,
                                                                        .max_sequence_length = max_sequence_length,
                                                                        .prefix_cache = prefix_cache,
                                                                        .prefix = std::move(prefix),
                                                                        .prefix_in_pages = prefix_in_pages,
                                                                        .prefix_has_positions = prefix_has_positions,
                                                                        .rates = {bytes_per_second, flops_per_second},
                                                                        .weight_bytes = std::move(weight_bytes),
                                                                        .fault = std::move(fault)}));
           }),
           py::arg("backend"), py::arg("model"), py::kw_only(), py::arg("max_sequences"), py::arg("token_budget"),
           py::arg("max_queue"), py::arg("max_sequence_length") = 0, py::arg("prefix_cache") = true, py::arg("fault") = "",
           py::arg("bytes_per_second") = 0.0, py::arg("flops_per_second") = 0.0, py::arg("weight_bytes") = std::vector<double>{},
           py::arg("prefix") = std::vector<int32_t>{}, py::arg("prefix_in_pages") = false, py::arg("prefix_has_positions") = true)
      .def("set_vocabulary", &Engine::set_vocabulary, py::arg("token_bytes"))
      .def(
          "submit",
          [](Engine& engine, const py::array& prompt, const SamplingParams& params, int sequences, int priority,
             double timeout_seconds, std::string cache_salt, uint64_t grammar, int64_t segment_start, int64_t segment_shift) {
            Request request{.prompt = token_ids(prompt),
                            .params = params,
                            .sequences = sequences,
                            .priority = priority,
                            .timeout_seconds = timeout_seconds,
                            .cache_salt = std::move(cache_salt),
                            .grammar = grammar,
                            .segment_start = segment_start,
                            .segment_shift = segment_shift};
            py::gil_scoped_release release;
            return engine.submit(std::move(request));
          },
          py::arg("prompt"), py::arg("params"), py::kw_only(), py::arg("sequences") = 1, py::arg("priority") = 0,
          py::arg("timeout_seconds") = 0.0, py::arg("cache_salt") = "", py::arg("grammar") = 0,
          py::arg("segment_start") = std::numeric_limits<int64_t>::max(), py::arg("segment_shift") = 0)
      .def("cancel", &Engine::cancel, py::arg("request"), py::arg("sequence") = -1, py::call_guard<py::gil_scoped_release>())
      .def("poll", &Engine::poll, py::call_guard<py::gil_scoped_release>())
      .def("event_fd", &Engine::event_fd)
      .def("masks", &Engine::masks)
      .def("drain", &Engine::drain, py::arg("timeout_seconds"), py::call_guard<py::gil_scoped_release>())
      .def("stats", [](const Engine& engine) { return stats_dict(engine.stats()); });
}

}  // namespace maga
