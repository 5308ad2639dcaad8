"""uvicorn's HTTP/1.1 with what it leaves open: how long a request's head may be, and how long it may take."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from maga_transformer.request import Fault, RequestError
from maga_transformer.server.errors import encode, raw_error

HEAD_BYTES = 64 << 10  # counted by received chunk, so a head within one or two chunks may be longer
HEAD_SECONDS = 30.0


class BoundedHead(HttpToolsProtocol):
    """One connection. Its timer runs while a head is awaited: from the connection's start, and from a later head's first byte."""

    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:
            self._begin_head()

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_timer is not None and self._head_bytes > HEAD_BYTES:
            self._refuse("431 Request Header Fields Too Large", f"the request's head is larger than {HEAD_BYTES} bytes")

    def send_400_response(self, msg: str) -> None:
        self._refuse("400 Bad Request", msg)

    def _begin_head(self) -> None:
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if self._answering():  # nothing is read while requests sent ahead wait for their turn
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_is_late)
        else:
            self._refuse("408 Request Timeout", f"the request's head did not come within {HEAD_SECONDS:.0f} s")

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: str, message: str) -> None:
        """Says why and closes; only closes where it would get into an earlier request's answer."""
        if not self._answering():
            body = encode(raw_error(RequestError(Fault.body, message)))
            head = (
                f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self._end_head()
        self.transport.close()
