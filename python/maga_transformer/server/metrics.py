"""Prometheus: the engine's own counters read at each scrape, and histograms of outputs. vLLM's names, behind a prefix of ours."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from maga_transformer.request import Fault
from maga_transformer.runtime import Runtime
from maga_transformer.server.watchdog import Watchdog

if TYPE_CHECKING:
    from maga_transformer._core import Event

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
_FAILURES = {"timeout": "timeout", "error": "execution"}
OUTCOMES = ("finished", "cancelled", "rejected", "failed")
_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "timeout": "timeout", "error": "error"}


class Metrics:
    """One per server. `events` takes every event of every sequence, whoever asked for it and however it ends."""

    def __init__(self, runtime: Runtime, watchdog: Watchdog) -> None:
        # A _created series beside each counter says nothing that process_start_time does not.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._model = runtime.description.names[0]
        self._prefix = runtime.config.metrics_prefix
        self._gaps = _Gaps()
        self._registry.register(_EngineCollector(runtime, watchdog, self._gaps))
        ProcessCollector(registry=self._registry)
        self._success = self._counter("request_success", "Outputs that ended, by reason", "finished_reason")
        for reason in _REASONS.values():
            self._success.labels(self._model, reason)
        self._failed = self._counter("request_failure", "Outputs that did not end by themselves, by error", "err")
        for error in _FAILURES.values():
            self._failed.labels(self._model, error)
        self._rejected = self._counter("request_rejected", "Requests refused before they reached the engine, by reason", "reason")
        self._received = Counter(
            self._prefix + "http_requests_received", "POST requests that came in", ["model_name"], registry=self._registry
        ).labels(self._model)
        self._answered = self._counter("http_requests_answered", "POST requests that are over, by how", "outcome")
        for outcome in OUTCOMES:
            self._answered.labels(self._model, outcome)
        self._first_token = self._histogram("time_to_first_token_seconds", "From submission to the first token", _SECONDS)
        self._per_token = self._histogram("time_per_output_token_seconds", "Mean time between an output's tokens", _PER_TOKEN)
        self._whole = self._histogram("e2e_request_latency_seconds", "From submission to the end", _SECONDS)
        self._queue = self._histogram("request_queue_time_seconds", "From submission to the first step", _SECONDS)
        self._prefill = self._histogram("request_prefill_time_seconds", "From the first step to the first token", _SECONDS)
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the end", _SECONDS)
        self._prompt = self._histogram("request_prompt_tokens", "Tokens of the prompt, of every output, however it ended", _TOKENS)
        self._output = self._histogram("request_generation_tokens", "Tokens of the output, however it ended", _TOKENS)

    def events(self, events: Sequence[Event]) -> None:
        now = time.monotonic()
        for event in events:
            output = (event.request, event.sequence)
            if event.tokens:
                self._gaps.token(output, now)
            if event.finish:
                self._gaps.forget(output)
                self._finished(event)

    def _finished(self, event: Event) -> None:
        self._success.labels(self._model, _REASONS[event.finish]).inc()
        if event.finish in _FAILURES:
            self._failed.labels(self._model, _FAILURES[event.finish]).inc()
        self._whole.observe(event.total_seconds)
        self._queue.observe(event.wait_seconds)
        self._prompt.observe(event.prompt_tokens)
        self._output.observe(event.output_tokens)
        if event.output_tokens > 0:
            self._first_token.observe(event.first_token_seconds)
            self._prefill.observe(max(0.0, event.first_token_seconds - event.wait_seconds))
            self._decode.observe(max(0.0, event.total_seconds - event.first_token_seconds))
        if event.output_tokens > 1:
            self._per_token.observe((event.total_seconds - event.first_token_seconds) / (event.output_tokens - 1))

    def received(self) -> None:
        self._received.inc()

    def answered(self, outcome: str) -> None:
        """One of OUTCOMES: with the answer; by the client's leaving; refused before the engine had it; with an error after that."""
        self._answered.labels(self._model, outcome).inc()

    def rejected(self, fault: Fault) -> None:
        self._rejected.labels(self._model, fault.value).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _counter(self, name: str, help: str, label: str) -> Counter:
        return Counter(self._prefix + name, help, ["model_name", label], registry=self._registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(self._prefix + name, help, ["model_name"], buckets=buckets, registry=self._registry).labels(self._model)


class _Gaps:
    """Seconds between the tokens of an output, in buckets: a histogram that costs little at every token."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], float] = {}
        self._counts = [0] * (len(_PER_TOKEN) + 1)
        self._sum = 0.0

    def token(self, output: tuple[int, int], now: float) -> None:
        last = self._last.get(output)
        if last is not None:
            self._counts[bisect_left(_PER_TOKEN, now - last)] += 1
            self._sum += now - last
        self._last[output] = now

    def forget(self, output: tuple[int, int]) -> None:
        self._last.pop(output, None)

    def metric(self, name: str, model: str) -> Metric:
        bounds = map(str, (*_PER_TOKEN, float("inf")))
        buckets = [
            (bound.replace("inf", "+Inf"), float(count)) for bound, count in zip(bounds, accumulate(self._counts), strict=True)
        ]
        family = HistogramMetricFamily(name, "Between the tokens of an output, as the front end saw them", labels=["model_name"])
        family.add_metric([model], buckets, self._sum)
        return family


class _EngineCollector(Collector):
    def __init__(self, runtime: Runtime, watchdog: Watchdog, gaps: _Gaps) -> None:
        self._runtime = runtime
        self._watchdog = watchdog
        self._gaps = gaps
        self._model = runtime.description.names[0]
        self._prefix = runtime.config.metrics_prefix

    def collect(self) -> Iterator[Metric]:
        stats = self._runtime.engine.stats()
        total = stats["pages_total"]
        yield self._gauge("num_requests_running", "Sequences in the running batch", stats["running"])
        yield self._gauge("num_requests_waiting", "Sequences waiting for the batch", stats["waiting"])
        yield self._gauge(
            "kv_cache_usage_perc", "Share of the K/V pages that running sequences hold", stats["pages_live"] / total if total else 0
        )
        pages = GaugeMetricFamily(self._prefix + "kv_pages", "K/V pages by state", labels=["model_name", "state"])
        for state in ("live", "cached", "free"):
            pages.add_metric([self._model, state], stats["pages_" + state])
        yield pages
        for name, key, help in (
            ("prefix_cache_queries", "prompt_tokens", "Prompt tokens looked up in the prefix cache"),
            ("prefix_cache_hits", "cached_tokens", "Prompt tokens found in the prefix cache"),
            ("num_preemptions", "preemptions", "Sequences that gave their pages up and were computed again"),
            ("prefix_cache_evictions", "evictions", "Pages that left the prefix cache to others"),
            ("prompt_tokens", "prompt_tokens", "Prompt tokens of requests that began to run, once a request"),
            ("generation_tokens", "output_tokens", "Generated tokens"),
            ("requests", "requests", "Requests that the engine took"),
            ("engine_steps", "steps", "Engine steps"),
            ("grammar_masks", "masks", "Masks of grammars that rows were to be sampled with"),
            ("grammar_masks_late", "masks_late", "Of them, those that came too late for their step"),
            ("corrupted_requests", "corrupted", "Sequences that ended because their logits were not finite"),
        ):
            counter = CounterMetricFamily(self._prefix + name, help, labels=["model_name"])
            counter.add_metric([self._model], stats[key])
            yield counter
        ended = CounterMetricFamily(
            self._prefix + "requests_ended", "Requests that the engine took and that ended, by how", labels=["model_name", "end"]
        )
        for end in ("finished", "cancelled", "failed"):
            ended.add_metric([self._model, end], stats[end])
        yield ended
        seconds = CounterMetricFamily(self._prefix + "engine_seconds", "Where step time went", labels=["model_name", "part"])
        for part in ("model", "sample", "host", "overlapped"):
            seconds.add_metric([self._model, part], stats[part + "_seconds"])
        yield seconds
        least = CounterMetricFamily(
            self._prefix + "engine_least_seconds",
            "What the steps would have taken at the device's peak rates",
            labels=["model_name", "part"],
        )
        for part, key in (("all", ""), ("weights", "weights_"), ("kv", "kv_"), ("arithmetic", "arithmetic_")):
            least.add_metric([self._model, part], stats[f"least_{key}seconds"])
        yield least
        stalls = CounterMetricFamily(
            self._prefix + "watchdog_stalls", "Times that the engine or the event loop stood still", labels=["model_name"]
        )
        stalls.add_metric([self._model], self._watchdog.stalls)
        yield stalls
        yield self._gaps.metric(self._prefix + "inter_token_latency_seconds", self._model)

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(self._prefix + name, help, labels=["model_name"])
        gauge.add_metric([self._model], value)
        return gauge
