"""While the model loads: every request is told so, which suits probes and routers better than a closed port."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from maga_transformer.config import Config
from maga_transformer.request import Fault, RequestError
from maga_transformer.server.auth import LIVE_PATHS
from maga_transformer.server.errors import CODES, RETRY_AFTER_SECONDS, encode, error_body

_PATIENCE_SECONDS = 5.0  # with a head, and with a body that nobody reads
_HEAD_BYTES = 64 << 10


@contextlib.contextmanager
def telling_of_the_load(listener: socket.socket, config: Config) -> Iterator[None]:
    """Answers on a socket that listens, from a thread of its own. Connections that come later wait for the server."""
    end: Future[Callable[[], object]] = Future()

    async def answer() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        own = listener.dup()  # closed with this server, while the listener goes on
        server = await asyncio.start_server(_answer, sock=own, ssl=_tls(config), limit=_HEAD_BYTES)
        end.set_result(lambda: loop.call_soon_threadsafe(ended.set))
        await ended.wait()
        server.close()  # answers that are not out by now are given up

    thread = threading.Thread(target=lambda: asyncio.run(answer()), name="loading", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.result(_PATIENCE_SECONDS)()
        thread.join(_PATIENCE_SECONDS)
        listener.setblocking(True)  # the copy shared its mode


def _tls(config: Config) -> ssl.SSLContext | None:
    if not config.ssl_certfile:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile or None)
    return context


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        await _tell(reader, writer)
    except (
        asyncio.CancelledError
    ):  # the load has ended; until Python 3.12 streams log a cancelled task as an error, with a traceback
        writer.close()


async def _tell(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, ValueError, asyncio.TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _PATIENCE_SECONDS)
        target = head.split(b"\r\n", 1)[0].split(b" ")[1].decode("latin-1")
        writer.write(response(target.split("?")[0]))
        await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
        with contextlib.suppress(asyncio.TimeoutError):  # a connection that is closed on unread bytes may take the answer with it
            await asyncio.wait_for(reader.read(1 << 20), _PATIENCE_SECONDS)
    with contextlib.suppress(OSError):
        writer.close()


def response(path: str) -> bytes:
    """The whole answer to a request of this path."""
    error = RequestError(Fault.loading, "Loading model")
    live = path.removesuffix("/") in LIVE_PATHS
    body = encode("ok" if live else error_body(error, path))
    head = [
        "HTTP/1.1 200 OK" if live else f"HTTP/1.1 {CODES[error.fault].status} Service Unavailable",
        "content-type: application/json",
        f"content-length: {len(body)}",
        *([] if live else [f"retry-after: {RETRY_AFTER_SECONDS[error.fault]}"]),
        "connection: close",
    ]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body
