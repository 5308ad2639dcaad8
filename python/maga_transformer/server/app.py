"""The application: its routes, and the one place where a request begins and ends (id, log line, errors)."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from uuid import uuid4

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from maga_transformer import __version__
from maga_transformer.models.task import GENERATE
from maga_transformer.request import Fault, RequestError
from maga_transformer.runtime import Runtime
from maga_transformer.server import embeddings, openai, raw, status
from maga_transformer.server.errors import as_request_error, error_response
from maga_transformer.server.metrics import Metrics
from maga_transformer.server.state import State
from maga_transformer.server.streaming import ClientGone

log = logging.getLogger("maga_transformer.requests")

_HEALTH = ("/health", "/status", "/GraphService/cm2_status", "/SearchService/cm2_status")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def create_app(runtime: Runtime) -> FastAPI:
    metrics = Metrics(runtime)
    runtime.on_finish = metrics.finished
    state = State(runtime, ThreadPoolExecutor(2, "tokenise"), metrics, status.StallWatch())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loop, events = asyncio.get_running_loop(), runtime.engine.event_fd()
        loop.add_reader(events, runtime.dispatch)
        yield
        loop.remove_reader(events)
        state.tokenising.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(title="maga_transformer", version=__version__, lifespan=lifespan, openapi_url=None)
    app.state.maga = state
    generates = runtime.description.task.kind == GENERATE
    app.add_api_route("/", raw.raw if generates else embeddings.embeddings, methods=["POST"])  # as in RTP-LLM
    app.add_api_route("/", status.home, methods=["GET"])
    for path in _HEALTH:
        app.add_api_route(path, status.health, methods=["GET", "POST"])
    app.add_api_route("/health_check", status.health, methods=["POST"])
    app.add_api_route("/worker_status", status.worker_status, methods=["GET"])
    app.add_api_route("/metrics", status.metrics, methods=["GET"])
    for prefix in ("/v1", ""):
        app.add_api_route(prefix + "/chat/completions", openai.chat_completions, methods=["POST"])
        app.add_api_route(prefix + "/completions", openai.completions, methods=["POST"])
        app.add_api_route(prefix + "/models", openai.models, methods=["GET"])
        app.add_api_route(prefix + "/embeddings", embeddings.embeddings, methods=["POST"])
        app.add_api_route(prefix + "/rerank", embeddings.rerank, methods=["POST"])
        app.add_api_route(prefix + "/score", embeddings.score, methods=["POST"])
    app.add_api_route("/v1/embeddings/similarity", embeddings.similarity, methods=["POST"])
    app.add_api_route("/v1/reranker", embeddings.reranker, methods=["POST"])
    app.add_api_route("/tokenizer/encode", status.tokenizer_encode, methods=["POST"])
    app.add_api_route("/tokenize", status.tokenize, methods=["POST"])
    app.add_api_route("/detokenize", status.detokenize, methods=["POST"])
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(_Door, state=state)
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    """The router's own refusals."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        raise RequestError(Fault.method, f"{request.method} is not allowed on {path[:128]}")
    if error.status_code == 404:
        raise RequestError(Fault.not_found, f"there is no {path[:128]} here")
    raise RequestError(Fault.body, str(error.detail))


class _Door:
    """Every request passes once: it gets an id, an answer whatever happens, and a line in the log without its text."""

    def __init__(self, app: ASGIApp, state: State) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        started, status_code = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status_code
            if message["type"] == "http.response.start":
                status_code = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientGone:
            status_code = 499
        except Exception as error:
            refused = as_request_error(error)
            if status_code:
                raise  # the head is out: the server closes the connection, which tells the client
            self._state.metrics.rejected(refused.fault)
            await error_response(refused, scope["path"])(scope, receive, send_with_id)
        if not scope.get("state", {}).get("private"):
            log.info(
                "%s %s %s %d %.1f ms",
                request_id.decode(),
                scope["method"],
                scope["path"],
                status_code,
                (time.monotonic() - started) * 1e3,
            )


def _request_id(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value.decode("latin-1")):
            return bytes(value)
    return uuid4().hex.encode()
