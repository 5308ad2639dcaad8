"""Every route, in one table: the application is built from it, docs/api.md too."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from maga_transformer.server import admin, anthropic, embeddings, health, kobold, openai, page, raw, responses, status
from maga_transformer.server.auth import LIVE_PATHS

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Route:
    group: str
    path: str
    endpoint: Endpoint
    methods: Sequence[str]


_HEALTH = ("/health", "/ping", "/status", "/frontend_health", "/GraphService/cm2_status", "/SearchService/cm2_status")
_OPENAI: tuple[tuple[str, Endpoint, str], ...] = (
    ("/chat/completions", openai.chat_completions, "POST"),
    ("/completions", openai.completions, "POST"),
    ("/responses", responses.responses, "POST"),
    ("/responses/input_tokens", responses.input_tokens, "POST"),
    ("/models", openai.models, "GET"),
    ("/models/{name:path}", openai.model, "GET"),
    ("/embeddings", embeddings.embeddings, "POST"),
    ("/rerank", embeddings.rerank, "POST"),
    ("/score", embeddings.score, "POST"),
)


def routes(*, generates: bool) -> list[Route]:
    """`generates`: what POST / does depends on the model, as in RTP-LLM."""
    return [
        Route("RTP-LLM", "/", raw.raw if generates else embeddings.embeddings, ["POST"]),
        Route("RTP-LLM", "/tokenizer/encode", status.tokenizer_encode, ["POST"]),
        *(Route("RTP-LLM", prefix + "/chat/render", openai.chat_render, ["POST"]) for prefix in ("/v1", "")),
        Route("RTP-LLM", "/worker_status", status.worker_status, ["GET"]),
        *(Route("RTP-LLM", f"/v1/embeddings/{kind}", route, ["POST"]) for kind, route in embeddings.OF_KINDS.items()),
        Route("RTP-LLM", "/v1/embeddings/similarity", embeddings.similarity, ["POST"]),
        Route("RTP-LLM", "/v1/reranker", embeddings.reranker, ["POST"]),
        *(
            Route("OpenAI and vLLM", prefix + path, endpoint, [method])
            for prefix in ("/v1", "")
            for path, endpoint, method in _OPENAI
        ),
        Route("OpenAI and vLLM", "/v2/rerank", embeddings.rerank, ["POST"]),
        Route("OpenAI and vLLM", "/tokenize", status.tokenize, ["POST"]),
        Route("OpenAI and vLLM", "/detokenize", status.detokenize, ["POST"]),
        Route("OpenAI and vLLM", "/tokenizer_info", status.tokenizer_info, ["GET"]),
        Route("Anthropic", "/v1/messages", anthropic.messages, ["POST"]),
        Route("Anthropic", "/v1/messages/count_tokens", anthropic.count_tokens, ["POST"]),
        *(Route("KoboldAI", path, endpoint, methods) for path, endpoint, methods in kobold.ROUTES),
        Route("Operating", "/", page.home, ["GET"]),
        Route("Operating", "/page/engine", page.engine, ["GET"]),
        Route("Operating", "/page/{name}", page.file, ["GET"]),
        *(Route("Operating", path, health.ready, ["GET", "POST"]) for path in _HEALTH),
        Route("Operating", "/health_check", health.ready, ["POST"]),
        Route("Operating", "/health/ready", health.ready, ["GET"]),
        *(Route("Operating", path, health.live, ["GET"]) for path in LIVE_PATHS),
        Route("Operating", "/metrics", status.metrics, ["GET"]),
        Route("Operating", "/version", status.version, ["GET"]),
        Route("Operating", "/openapi.json", status.openapi, ["GET"]),
        Route("Operating", "/server_info", admin.server_info, ["GET"]),
        Route("RTP-LLM", "/update", admin.update, ["POST"]),
        Route("Operating", "/set_log_level", admin.set_log_level, ["POST"]),
    ]
