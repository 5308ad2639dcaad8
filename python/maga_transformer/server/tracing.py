"""OpenTelemetry: a span of every request that asks for work, as a child of the caller's `traceparent`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from maga_transformer import __version__
from maga_transformer.config import Config, ConfigError

# A field of a request's log line -> the name that the conventions for generative models, or vLLM, give it.
_ATTRIBUTES = {
    "id": "gen_ai.request.id",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "queue_ms": "gen_ai.latency.time_in_queue",
    "first_token_ms": "gen_ai.latency.time_to_first_token",
    "method": "http.request.method",
    "path": "url.path",
    "status": "http.response.status_code",
    "error": "error.type",
}


class Tracer:
    """ConfigError where the libraries are missing. Spans are sent in the background, by a thread of the library's."""

    def __init__(self, config: Config, model: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"OTLP_TRACES_ENDPOINT={config.otlp_traces_endpoint}: {error.name} is missing: pip install 'maga_transformer[otel]'"
            ) from None
        resource = Resource.create({"service.name": "maga_transformer", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(config.otlp_traces_endpoint)))
        self._tracer = self._provider.get_tracer("maga_transformer", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER
        self._model = model

    def record(self, fields: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        """Of a request that has just ended; `fields` are those of its log line."""
        ended = time.time_ns()
        span = self._tracer.start_span(
            f"{fields['method']} {fields['path']}",
            context=self._propagator.extract(headers),
            kind=self._kind,
            start_time=ended - int(fields["ms"] * 1e6),
        )
        span.set_attribute("gen_ai.request.model", self._model)
        for name, attribute in _ATTRIBUTES.items():
            if name in fields:
                span.set_attribute(attribute, fields[name] / 1e3 if name.endswith("_ms") else fields[name])
        if "finish" in fields:
            span.set_attribute("gen_ai.response.finish_reasons", fields["finish"].split(","))
        span.end(ended)

    def close(self) -> None:
        self._provider.shutdown()
