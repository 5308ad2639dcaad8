"""Server-sent events, and ending the work when the client is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from maga_transformer.request import RequestError
from maga_transformer.server.errors import as_request_error, encode
from maga_transformer.server.log import current

log = logging.getLogger(__name__)

Result = TypeVar("Result")
KEEP_ALIVE_SECONDS = 15.0
SEND_BODY = "maga_transformer.send"  # in a scope: the server's own `send`, which no middleware has wrapped
_KEEP_ALIVE = b": keep-alive\n\n"


class ClientGone(Exception):
    """Nobody is left to answer."""


async def unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """Awaits `work`, but cancels it and raises ClientGone as soon as the client disconnects. The body has been read."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(request.receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await _stop((task, watch))


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def openai_event(payload: Any) -> bytes:
    return b"data: " + encode(payload) + b"\n\n"


def named_event(name: str, payload: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + encode(payload) + b"\n\n"


def raw_event(payload: Any) -> bytes:
    return b"data:" + encode(payload) + b"\r\n\r\n"


class EventStream(Response):
    """Sends what `events` yields; `on_close` is called when the stream ends, at once if the client disconnects.

    An error after the head becomes `error_event(error)`, the stream's last event. With `keep_alive`, silence is broken by
    comments, which clients skip and proxies count as life. Middleware sees the head only: each layer would cost at every token."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        error_event: Callable[[RequestError], bytes],
        *,
        on_close: Callable[[], None],
        keep_alive: bool,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._error_event = error_event
        self._on_close = on_close
        self._keep_alive = keep_alive
        self._wrote = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = scope.get(SEND_BODY, send)
        tasks = [asyncio.ensure_future(self._write(send, body)), asyncio.ensure_future(_disconnect(receive))]
        beat = asyncio.ensure_future(self._beat(body)) if self._keep_alive else None
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._on_close()
            writer = tasks[0]
            record = current.get()
            if record and not writer.done():
                record.left = True
            await _stop([*tasks, beat] if beat else tasks)
        if writer.done() and not writer.cancelled():
            writer.result()
            await body({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, body: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for event in self._events:
                self._wrote = True
                await body({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            refused = as_request_error(error)
            record = current.get()
            if record:
                record.error = refused.fault.value
            event = self._error_event(refused)
            await body({"type": "http.response.body", "body": event, "more_body": True})

    async def _beat(self, body: Send) -> None:
        while True:
            self._wrote = False
            await asyncio.sleep(KEEP_ALIVE_SECONDS)
            if not self._wrote:
                await body({"type": "http.response.body", "body": _KEEP_ALIVE, "more_body": True})


async def _stop(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancels those that still run, and waits until they have ended."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
