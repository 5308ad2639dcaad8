"""uvicorn's HTTP/1.1 with what it leaves open: how long a request's head may be, how long it may take, that a request to speak
another protocol is answered in this one, and that HTTP/1.0 knows no chunks."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from maga_transformer.request import Fault, RequestError
from maga_transformer.server.errors import encode, raw_error

HEAD_BYTES = 64 << 10
HEAD_FIELDS = 256
_TOO_LONG = ("431 Request Header Fields Too Large", f"a request's head has at most {HEAD_BYTES} bytes and {HEAD_FIELDS} fields")


class BoundedHead(HttpToolsProtocol):
    """One connection. Its timer runs while a head is awaited: from the connection's start, and from a later head's first byte.
    `head_seconds`: how long."""

    _head_bytes = _head_fields = 0  # of the parts that are complete
    _unparsed = 0  # bytes that came since the head began
    _too_long = False
    _head_timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, head_seconds: float, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._head_seconds = head_seconds

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
        if not self.parser.should_upgrade():
            super().on_headers_complete()
            if self.parser.get_http_version() == "1.0":
                self.cycle.send = _UntilClosed(self.cycle).send  # type: ignore[method-assign, assignment]

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_url(self, url: bytes) -> None:
        self._bound(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_fields += 1
        self._bound(len(name) + len(value))
        super().on_header(name, value)

    def data_received(self, data: bytes) -> None:
        self._unparsed += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("this is no HTTP/1.1 request")
        if self._head_timer is not None and not self.transport.is_closing() and self._unparsed > HEAD_BYTES:
            self._refuse(*_TOO_LONG)

    def _decline_upgrade(self, rest: bytes) -> None:
        """The parser ended the request at its head, whatever body follows (`rest`, and more to come). So it is read again, as one
        that does not ask: Java's and curl's clients for HTTP/2 ask with every request and take an answer in HTTP/1.1."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self.send_400_response("this is no proxy")
            return
        head = b"%s %s HTTP/%s\r\n" % (method, self.url, self.parser.get_http_version().encode())
        kept = [b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(head + b"".join(kept) + b"\r\n" + rest)

    def send_400_response(self, msg: str) -> None:
        """Also of what a callback of the parser raised."""
        self._refuse(*(_TOO_LONG if self._too_long else ("400 Bad Request", msg)))

    def _bound(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > HEAD_BYTES or self._head_fields > HEAD_FIELDS:
            self._too_long = True
            raise ValueError("the head is too long")  # ends the parsing

    def _begin_head(self) -> None:
        self._head_bytes = self._head_fields = self._unparsed = 0
        self._head_timer = self.loop.call_later(self._head_seconds, self._head_is_late)

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if self._answering():  # nothing is read while requests sent ahead wait for their turn
            self._head_timer = self.loop.call_later(self._head_seconds, self._head_is_late)
        else:
            self._refuse("408 Request Timeout", f"the request's head did not come within {self._head_seconds:g} s (READ_TIMEOUT)")

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


class _UntilClosed:
    """What answers a request of HTTP/1.0: an answer of unknown length goes out as it is, and ends with the connection."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._endless = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._endless = all(name.lower() != b"content-length" for name, _ in message["headers"])
            if self._endless:
                self._cycle.chunked_encoding = False
        elif self._endless:
            self._cycle.expected_content_length = len(message.get("body", b""))  # what comes now is all that was promised
        await self._send(message)  # type: ignore[arg-type]
