"""The application: its routes, and the one place where a request begins and ends (id, log line, errors)."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from uuid import uuid4

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from maga_transformer.models.task import GENERATE
from maga_transformer.request import Fault, RequestError
from maga_transformer.runtime import Runtime
from maga_transformer.server.auth import Keys, route_path
from maga_transformer.server.errors import as_request_error, error_response
from maga_transformer.server.log import RequestRecord, current, log_request
from maga_transformer.server.metrics import Metrics
from maga_transformer.server.openapi import document_text
from maga_transformer.server.routes import routes
from maga_transformer.server.state import State
from maga_transformer.server.streaming import SEND_BODY, ClientGone
from maga_transformer.server.tracing import Tracer
from maga_transformer.server.watchdog import Watchdog

log = logging.getLogger("maga_transformer.requests")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def create_app(runtime: Runtime) -> Starlette:
    config = runtime.config
    watchdog = Watchdog(runtime)
    metrics = Metrics(runtime, watchdog)
    tracer = Tracer(config, runtime.description.names[0]) if config.otlp_traces_endpoint else None
    runtime.on_events = metrics.events
    dialect = config.dialect(runtime.tokenizer.chat_templates)
    keys = Keys(config.api_key, config.admin_api_key)
    table = routes(generates=runtime.description.task.kind == GENERATE)
    described = functools.cache(lambda: document_text(table, keys=bool(config.api_key or config.admin_api_key)))
    state = State(runtime, ThreadPoolExecutor(2, "tokenise"), metrics, watchdog, dialect, keys, described)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        loop, events = asyncio.get_running_loop(), runtime.engine.event_fd()
        loop.add_reader(events, runtime.dispatch)
        watchdog.start(loop)
        yield
        watchdog.stop()
        if tracer:
            tracer.close()
        loop.remove_reader(events)
        runtime.close()
        state.tokenising.shutdown(wait=False, cancel_futures=True)

    served = [Route(route.path, route.endpoint, methods=list(route.methods)) for route in table]  # HEAD where GET is, for probes
    app = Starlette(routes=served, exception_handlers={HTTPException: _http_error}, lifespan=lifespan)
    app.router.redirect_slashes = False  # many clients repeat no POST elsewhere, so the door takes the slash off
    app.state.maga = state
    app.add_middleware(_Door, state=state, tracer=tracer)
    if config.allowed_origins:  # outside of the door: a browser asks before it sends a key, and must be able to read refusals
        app.add_middleware(
            CORSMiddleware, allow_origins=config.allowed_origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"]
        )
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

    def __init__(self, app: ASGIApp, state: State, tracer: Tracer | None) -> None:
        self._app = app
        self._state = state
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"].endswith("/") and route_path(scope) != "/":
            scope["path"] = scope["path"][:-1]
        request_id = _request_id(scope)
        record = RequestRecord(request_id.decode(), scope["method"], scope["path"])
        token = current.set(record)
        scope[SEND_BODY] = send

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        metrics, is_post = self._state.metrics, scope["method"] == "POST"
        if is_post:
            metrics.received()
        try:
            self._state.keys.check(scope)
            await self._app(scope, receive, send_with_id)
        except ClientGone:
            record.status, record.left = 499, True
        except Exception as error:
            refused = as_request_error(error)
            record.error = refused.fault.value
            if record.status:
                raise  # the head is out: the server closes the connection, which tells the client
            if not record.reached_the_engine:
                metrics.rejected(refused.fault)
            await error_response(refused, route_path(scope))(scope, receive, send_with_id)
        except asyncio.CancelledError:  # the second signal ends the process: nobody is left to answer, nor to read a traceback
            record.left = True
        finally:
            current.reset(token)
            if is_post:
                metrics.answered(record.outcome)
        if not scope.get("state", {}).get("private"):
            fields = log_request(log, record)
            if self._tracer and record.method == "POST":
                self._tracer.record(fields, {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]})


def _request_id(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value.decode("latin-1")):
            return bytes(value)
    return uuid4().hex.encode()
