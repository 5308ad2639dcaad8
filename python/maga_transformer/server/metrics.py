"""Prometheus: the engine's own counters read at each scrape, and histograms of finished outputs. vLLM's names under `maga_`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from maga_transformer.request import Fault
from maga_transformer.runtime import Runtime

if TYPE_CHECKING:
    from maga_transformer._core import Event

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "timeout": "timeout", "error": "error"}


class Metrics:
    """One per server. `finished` takes every sequence's last event, whoever asked for it and however it ended."""

    def __init__(self, runtime: Runtime) -> None:
        # A _created series beside each counter says nothing that process_start_time does not.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._model = runtime.description.names[0]
        self._registry.register(_EngineCollector(runtime, self._model))
        ProcessCollector(registry=self._registry)
        self._success = self._counter("request_success", "Outputs that ended, by reason", "finished_reason")
        for reason in _REASONS.values():
            self._success.labels(self._model, reason)
        self._rejected = self._counter("request_rejected", "Requests refused before they reached the engine, by reason", "reason")
        self._first_token = self._histogram("time_to_first_token_seconds", "From submission to the first token", _SECONDS)
        self._per_token = self._histogram("time_per_output_token_seconds", "Mean time between an output's tokens", _PER_TOKEN)
        self._whole = self._histogram("e2e_request_latency_seconds", "From submission to the end", _SECONDS)
        self._queue = self._histogram("request_queue_time_seconds", "From submission to the first step", _SECONDS)
        self._prompt = self._histogram("request_prompt_tokens", "Tokens of the prompt", _TOKENS)
        self._output = self._histogram("request_generation_tokens", "Tokens of the output", _TOKENS)

    def finished(self, event: Event) -> None:
        self._success.labels(self._model, _REASONS[event.finish]).inc()
        self._whole.observe(event.total_seconds)
        self._queue.observe(event.wait_seconds)
        self._prompt.observe(event.prompt_tokens)
        self._output.observe(event.output_tokens)
        if event.output_tokens > 0:
            self._first_token.observe(event.first_token_seconds)
        if event.output_tokens > 1:
            self._per_token.observe((event.total_seconds - event.first_token_seconds) / (event.output_tokens - 1))

    def rejected(self, fault: Fault) -> None:
        self._rejected.labels(self._model, fault.value).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _counter(self, name: str, help: str, label: str) -> Counter:
        return Counter("maga_" + name, help, ["model_name", label], registry=self._registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram("maga_" + name, help, ["model_name"], buckets=buckets, registry=self._registry).labels(self._model)


class _EngineCollector(Collector):
    def __init__(self, runtime: Runtime, model: str) -> None:
        self._runtime = runtime
        self._model = model

    def collect(self) -> Iterator[Metric]:
        stats = self._runtime.engine.stats()
        total = stats["pages_total"]
        yield self._gauge("num_requests_running", "Sequences in the running batch", stats["running"])
        yield self._gauge("num_requests_waiting", "Sequences waiting for the batch", stats["waiting"])
        yield self._gauge(
            "kv_cache_usage_perc", "Share of the K/V pages that running sequences hold", stats["pages_live"] / total if total else 0
        )
        pages = GaugeMetricFamily("maga_kv_pages", "K/V pages by state", labels=["model_name", "state"])
        for state in ("live", "cached", "free"):
            pages.add_metric([self._model, state], stats["pages_" + state])
        yield pages
        for name, key, help in (
            ("prefix_cache_queries", "prompt_tokens", "Prompt tokens looked up in the prefix cache"),
            ("prefix_cache_hits", "cached_tokens", "Prompt tokens found in the prefix cache"),
            ("num_preemptions", "preemptions", "Sequences that gave their pages up and were computed again"),
            ("prompt_tokens", "prompt_tokens", "Prompt tokens"),
            ("generation_tokens", "output_tokens", "Generated tokens"),
            ("requests", "requests", "Requests that the engine took"),
            ("engine_steps", "steps", "Engine steps"),
        ):
            counter = CounterMetricFamily("maga_" + name, help, labels=["model_name"])
            counter.add_metric([self._model], stats[key])
            yield counter
        seconds = CounterMetricFamily("maga_engine_seconds", "Where step time went", labels=["model_name", "part"])
        for part in ("model", "sample", "host", "overlapped"):
            seconds.add_metric([self._model, part], stats[part + "_seconds"])
        yield seconds
        if self._runtime.description.card_bytes:  # its rates are known
            least = CounterMetricFamily(
                "maga_engine_least_seconds",
                "What the steps would have taken at the card's peak rates",
                labels=["model_name", "part"],
            )
            for part, key in (("all", ""), ("weights", "weights_"), ("kv", "kv_"), ("arithmetic", "arithmetic_")):
                least.add_metric([self._model, part], stats[f"least_{key}seconds"])
            yield least

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        gauge = GaugeMetricFamily("maga_" + name, help, labels=["model_name"])
        gauge.add_metric([self._model], value)
        return gauge
