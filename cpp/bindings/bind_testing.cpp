// `_core.testing`: the parts of the engine one by one, and a model whose output a test can predict. Nothing else uses it.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <chrono>

#include "bindings/bind.h"
#include "bindings/fake_model.h"
#include "cache/prefix.h"
#include "core/check.h"
#include "core/rng.h"
#include "decode/repeat.h"
#include "decode/sampler.h"
#include "decode/stop.h"
#include "decode/truncate.h"
#include "engine/scheduler.h"

namespace py = pybind11;

namespace maga {
namespace {

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;
using Tokens = std::vector<int32_t>;

Row row_of(const Floats& array) { return {array.data(), static_cast<size_t>(array.size())}; }

// Runs a stage over a copy of the row.
template <typename Stage>
Floats edited(const Floats& array, Stage stage) {
  Floats copy(array.size(), array.data());
  stage(MutableRow(copy.mutable_data(), copy.size()));
  return copy;
}

TokenCounts counts_of(const Tokens& prompt, const Tokens& output) {
  TokenCounts counts;
  counts.add_prompt(prompt);
  for (const int32_t token : output) counts.add_output(token);
  return counts;
}

std::vector<int32_t> ids_of(const std::vector<Candidate>& candidates) {
  std::vector<int32_t> ids;
  for (const auto& candidate : candidates) ids.push_back(candidate.id);
  return ids;
}

std::vector<Candidate> all_of(const Floats& row) {
  std::vector<Candidate> candidates;
  best_tokens(row_of(row), row.size(), &candidates);
  return candidates;
}

float max_of(const Floats& row) { return scan(row_of(row)).max; }

void bind_sampler(py::module_ m) {
  using Penalty = void (*)(MutableRow, const TokenCounts&, float);
  const auto penalty = [&](const char* name, Penalty stage) {
    m.def(
        name,
        [stage](const Floats& row, const Tokens& prompt, const Tokens& output, float value) {
          return edited(row, [&](MutableRow r) { stage(r, counts_of(prompt, output), value); });
        },
        py::arg("row"), py::arg("prompt"), py::arg("output"), py::arg("penalty"));
  };
  penalty("repetition_penalty", repetition_penalty);
  penalty("presence_penalty", presence_penalty);
  penalty("frequency_penalty", frequency_penalty);
  m.def("logit_bias", [](const Floats& row, const std::vector<std::pair<int32_t, float>>& bias) {
    return edited(row, [&](MutableRow r) { logit_bias(r, bias); });
  });
  m.def("ban_bad_words", [](const Floats& row, const std::vector<Tokens>& words, const Tokens& tokens) {
    return edited(row, [&](MutableRow r) { ban_bad_words(r, words, tokens); });
  });
  m.def("ban_tokens",
        [](const Floats& row, const Tokens& tokens) { return edited(row, [&](MutableRow r) { ban_tokens(r, tokens); }); });
  m.def("temperature",
        [](const Floats& row, float value) { return edited(row, [&](MutableRow r) { temperature(r, max_of(row), value); }); });
  m.def("scan", [](const Floats& row) {
    const RowScan result = scan(row_of(row));
    return py::make_tuple(result.max, result.argmax, result.finite);
  });
  m.def("rank", [](const Floats& row, int32_t token) { return rank(row_of(row), token); });
  m.def("exp", [](const Floats& row) {
    return edited(row, [](MutableRow r) {
      for (float& x : r) x = exp_negative(x);
    });
  });
  m.def("top_k", [](const Floats& row, int k) {
    std::vector<Candidate> candidates;
    top_k(row_of(row), k, &candidates);
    return ids_of(candidates);
  });
  m.def("top_p", [](const Floats& row, float p, bool among_candidates) {
    std::vector<Candidate> candidates;
    if (among_candidates)
      top_p(&(candidates = all_of(row)), p);
    else
      top_p(row_of(row), max_of(row), p, &candidates);
    return ids_of(candidates);
  });
  m.def("min_p", [](const Floats& row, float p, bool among_candidates) {
    std::vector<Candidate> candidates;
    if (among_candidates)
      min_p(&(candidates = all_of(row)), p);
    else
      min_p(row_of(row), max_of(row), p, &candidates);
    return ids_of(candidates);
  });
  // The stages of truncate.h.
  m.def("top_a", [](const Floats& row, float a) { return edited(row, [&](MutableRow r) { top_a(r, a); }); });
  m.def("epsilon_cutoff", [](const Floats& row, float x) { return edited(row, [&](MutableRow r) { epsilon_cutoff(r, x); }); });
  m.def("eta_cutoff", [](const Floats& row, float x) { return edited(row, [&](MutableRow r) { eta_cutoff(r, x); }); });
  m.def("top_n_sigma", [](const Floats& row, float n) { return edited(row, [&](MutableRow r) { top_n_sigma(r, n); }); });
  m.def("exclude_top", [](const Floats& row, float x) { return edited(row, [&](MutableRow r) { exclude_top(r, x); }); });
  m.def("drop_surprising", [](const Floats& row, float mu) { return edited(row, [&](MutableRow r) { drop_surprising(r, mu); }); });
  m.def("dynamic_temperature", [](const Floats& row, float least, float most, float exponent) {
    return dynamic_temperature(row_of(row), least, most, exponent);
  });
  m.def("quadratic", [](const Floats& row, float factor, float curve) {
    return edited(row, [&](MutableRow r) { quadratic(r, factor, curve); });
  });
  using Sorted = void (*)(MutableRow, float, std::vector<Candidate>*);
  const auto sorted = [&](const char* name, Sorted stage) {
    m.def(name, [stage](const Floats& row, float value) {
      std::vector<Candidate> scratch;
      return edited(row, [&](MutableRow r) { stage(r, value, &scratch); });
    });
  };
  sorted("typical", typical);
  sorted("tail_free", tail_free);
  sorted("skew", skew);
  m.def("no_repeat_ngram", [](const Floats& row, const Tokens& tokens, int size) {
    return edited(row, [&](MutableRow r) { no_repeat_ngram(r, tokens, size); });
  });
  m.def(
      "dry",
      [](const Floats& row, const Tokens& tokens, float multiplier, float base, int allowed_length, int range,
         const Tokens& breakers) {
        return edited(row, [&](MutableRow r) { dry(r, tokens, {multiplier, base, allowed_length, range, breakers}); });
      },
      py::arg("row"), py::arg("tokens"), py::arg("multiplier") = 1.0f, py::arg("base") = 1.75f, py::arg("allowed_length") = 2,
      py::arg("range") = 0, py::arg("breakers") = Tokens{});
  m.def("draw", [](const Floats& row, double u, bool among_candidates) {
    std::vector<double> blocks;
    return among_candidates ? draw(all_of(row), u) : draw(row_of(row), max_of(row), u, &blocks);
  });
  m.def("uniform", &uniform, py::arg("seed"), py::arg("stream"), py::arg("index"));
  m.def(
      "sample",
      [](const Floats& row, const SamplingParams& params, const Tokens& prompt, const Tokens& output, uint64_t stream,
         float mirostat_mu) {
        Tokens tokens = prompt;
        tokens.insert(tokens.end(), output.begin(), output.end());
        const TokenCounts counts = counts_of(prompt, output);
        SampleScratch scratch;
        Sampled result;
        sample({.logits = row_of(row),
                .params = &params,
                .counts = &counts,
                .tokens = tokens,
                .output_tokens = static_cast<int64_t>(output.size()),
                .allowed = {},
                .seed = params.seed.value_or(0),
                .stream = stream,
                .mirostat_mu = mirostat_mu},
               &scratch, &result);
        constexpr const char* kNames[] = {"ok", "non_finite", "no_token"};
        return py::make_tuple(kNames[static_cast<int>(result.status)], result.token, result.logprobs.logprob, result.logprobs.top);
      },
      py::arg("row"), py::arg("params"), py::arg("prompt"), py::arg("output"), py::arg("stream") = 0,
      py::arg("mirostat_mu") = 0.0f);
}

// A matcher with the params it refers to.
struct OwnedMatcher {
  OwnedMatcher(const SamplingParams& given, const std::vector<std::string>& vocabulary)
      : params(given), matcher(params, std::make_shared<const Vocabulary>(vocabulary)) {}
  SamplingParams params;
  Tokens output;
  StopMatcher matcher;
};

void bind_stop(py::module_& m) {
  py::class_<OwnedMatcher>(m, "StopMatcher")
      .def(py::init<const SamplingParams&, const std::vector<std::string>&>(), py::arg("params"), py::arg("vocabulary"))
      .def("append", [](OwnedMatcher& self, int32_t token) {
        self.output.push_back(token);
        const StopMatch match = self.matcher.append(self.output);
        return py::make_tuple(match.stop_token, match.stop_word, match.stop_string);
      });
}

void bind_cache(py::module_& m) {
  py::class_<PrefixCache::Position>(m, "Position")
      .def(py::init<>())
      .def_readonly("entry", &PrefixCache::Position::entry)
      .def_readonly("pages", &PrefixCache::Position::pages);
  py::class_<PrefixCache>(m, "PrefixCache")
      .def(py::init<int64_t, int64_t, bool>(), py::arg("pages"), py::arg("page_tokens"), py::arg("enabled") = true)
      .def_property_readonly("total", [](const PrefixCache& c) { return c.pool().total(); })
      .def_property_readonly("free", [](const PrefixCache& c) { return c.pool().free(); })
      .def_property_readonly("cached", &PrefixCache::cached)
      .def_property_readonly("available", &PrefixCache::available)
      .def("references", [](const PrefixCache& c, int32_t page) { return c.pool().references(page); })
      .def("allocate", &PrefixCache::allocate)
      .def("hold", &PrefixCache::hold)
      .def("release", [](PrefixCache& c, const Tokens& pages) { c.release(pages); })
      .def("peek",
           [](const PrefixCache& c, const std::string& salt, const Tokens& tokens) {
             const auto match = c.peek(salt, tokens);
             return py::make_tuple(match.pages, match.unheld);
           })
      .def("match",
           [](PrefixCache& c, const std::string& salt, const Tokens& tokens) {
             std::vector<int32_t> pages;
             const auto position = c.match(salt, tokens, &pages);
             return py::make_tuple(position, pages);
           })
      .def("insert",
           [](PrefixCache& c, const std::string& salt, const Tokens& tokens, std::vector<int32_t> pages, PrefixCache::Position at) {
             c.insert(salt, tokens, pages, &at);
             return py::make_tuple(at, pages);
           })
      .def("forget", [](PrefixCache& c, const Tokens& pages) { c.forget(pages); });
  py::class_<PagePool>(m, "PagePool")
      .def(py::init<int64_t>(), py::arg("pages"))
      .def_property_readonly("total", &PagePool::total)
      .def_property_readonly("free", &PagePool::free)
      .def("references", [](const PagePool& p, int32_t page) { return p.references(page); })
      .def("take", &PagePool::take)
      .def("hold", &PagePool::hold)
      .def("drop", &PagePool::drop)
      .def("give_back", &PagePool::give_back);
}

// known, computed, pages or unheld, slots, whole, scored
using RunningRow = std::tuple<int64_t, int64_t, Tokens, int64_t, int64_t, int64_t>;
using WaitingRow = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;

void bind_scheduler(py::module_& m) {
  py::class_<Scheduler>(m, "Scheduler")
      .def(py::init([](int64_t token_budget, int64_t max_sequences, int64_t page_tokens, int64_t total_pages, int64_t logit_rows) {
             return Scheduler({.token_budget = token_budget,
                               .max_sequences = max_sequences,
                               .page_tokens = page_tokens,
                               .total_pages = total_pages,
                               .logit_rows = logit_rows});
           }),
           py::kw_only(), py::arg("token_budget"), py::arg("max_sequences"), py::arg("page_tokens"), py::arg("total_pages"),
           py::arg("logit_rows"))
      .def(
          "plan",
          [](Scheduler& scheduler, const std::vector<RunningRow>& running, const std::vector<WaitingRow>& waiting,
             const Tokens& references, int64_t available) {
            std::vector<PlanSequence> running_view, waiting_view;
            for (const auto& [known, computed, pages, slots, whole, scored] : running)
              running_view.push_back(
                  {.known = known, .computed = computed, .pages = pages, .slots = slots, .whole = whole, .scored = scored});
            for (const auto& [known, computed, unheld, slots, whole, scored] : waiting)
              waiting_view.push_back({.known = known,
                                      .computed = computed,
                                      .pages = {},
                                      .unheld = unheld,
                                      .slots = slots,
                                      .whole = whole,
                                      .scored = scored});
            const Plan& plan = scheduler.plan(
                {.running = running_view, .waiting = waiting_view, .references = references, .available = available});
            const auto runs = [](const std::vector<Plan::Run>& all) {
              py::dict tokens;
              for (const auto& run : all) tokens[py::int_(run.sequence)] = run.tokens;
              return tokens;
            };
            return py::dict(py::arg("running") = runs(plan.running), py::arg("admitted") = runs(plan.admitted),
                            py::arg("preempted") = plan.preempted, py::arg("reject_first") = plan.reject_first);
          },
          py::arg("running"), py::arg("waiting"), py::arg("references"), py::arg("available"));
}

void bind_fake_model(py::module_& m) {
  py::class_<FakeControl, std::shared_ptr<FakeControl>>(m, "FakeControl")
      .def("hold",
           [](FakeControl& c) {
             std::lock_guard lock(c.mutex);
             c.held = true;
           })
      .def("release",
           [](FakeControl& c) {
             std::lock_guard lock(c.mutex);
             c.held = false;
             c.changed.notify_all();
           })
      .def(
          "wait_until_held",
          [](FakeControl& c, double seconds) {
            std::unique_lock lock(c.mutex);
            return c.changed.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return c.waiting; });
          },
          py::arg("seconds") = 30.0, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("steps",
                             [](FakeControl& c) {
                               std::lock_guard lock(c.mutex);
                               py::list steps;
                               for (const FakeStep& step : c.steps)
                                 steps.append(py::make_tuple(step.tokens, step.sequence_tokens, step.kv_length));
                               return steps;
                             })
      .def_property_readonly("draws",
                             [](FakeControl& c) {
                               std::lock_guard lock(c.mutex);
                               py::list draws;
                               for (const FakeStep& step : c.steps) draws.append(step.draws);
                               return draws;
                             })
      .def_property_readonly("ahead",
                             [](FakeControl& c) {
                               std::lock_guard lock(c.mutex);
                               py::list ahead;
                               for (const FakeStep& step : c.steps) ahead.append(step.ahead);
                               return ahead;
                             })
      .def(
          "fail",
          [](FakeControl& c, int enqueue, int collect, bool lost) {
            std::lock_guard lock(c.mutex);
            c.lost = lost;
            c.fail_enqueue = enqueue;
            c.fail_collect = collect;
          },
          py::kw_only(), py::arg("enqueue") = 0, py::arg("collect") = 0, py::arg("lost") = false);
  m.def(
      "fake_model",
      [](int64_t vocab, int64_t pages, int64_t page_tokens, int64_t tokens, int64_t sequences, int64_t logit_rows,
         int64_t length_dependent_from, int64_t long_from, int32_t poison, int64_t max_positions, bool asynchronous, bool embeds) {
        auto control = std::make_shared<FakeControl>();
        std::unique_ptr<Executable> model = std::make_unique<FakeModel>(FakeOptions{.vocab = vocab,
                                                                                    .length_dependent_from = length_dependent_from,
                                                                                    .long_from = long_from,
                                                                                    .poison = poison,
                                                                                    .max_positions = max_positions,
                                                                                    .asynchronous = asynchronous,
                                                                                    .embeds = embeds},
                                                                        Limits{.tokens = tokens,
                                                                               .sequences = sequences,
                                                                               .logit_rows = logit_rows ? logit_rows : sequences,
                                                                               .pages = pages,
                                                                               .page_tokens = page_tokens},
                                                                        control);
        return py::make_tuple(py::cast(std::move(model)), control);
      },
      py::kw_only(), py::arg("vocab"), py::arg("pages"), py::arg("page_tokens"), py::arg("tokens"), py::arg("sequences"),
      py::arg("logit_rows") = 0, py::arg("length_dependent_from") = 0, py::arg("long_from") = 0, py::arg("poison") = -1,
      py::arg("max_positions") = 0, py::arg("asynchronous") = false, py::arg("embeds") = false);
  m.def(
      "fake_backend", [](int threads) -> std::shared_ptr<Backend> { return std::make_shared<FakeBackend>(threads); },
      py::arg("threads") = 1);
}

}  // namespace

void bind_testing(py::module_& m) {
  py::module_ testing = m.def_submodule("testing");
  bind_sampler(testing.def_submodule("sampler"));
  bind_stop(testing);
  bind_cache(testing);
  bind_scheduler(testing);
  bind_fake_model(testing);
}

}  // namespace maga
