"""Requests whose head is too long or never ends, and that none of this touches an answer under way. Without a model."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from maga_transformer.server import protocol
from uvicorn.server import ServerState

GET = b"GET / HTTP/1.1\r\nHost: x\r\n"


async def app(scope, receive, send):
    """Answers in two parts, one late; /echo with the body; /stream in parts, without saying how long they are."""
    if scope["path"] == "/echo":
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})
        return
    length = [] if scope["path"] == "/stream" else [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": length})
    await send({"type": "http.response.body", "body": b"a", "more_body": True})
    await asyncio.sleep(0.3)
    await send({"type": "http.response.body", "body": b"b"})


@asynccontextmanager
async def connection(head_seconds: float = 30.0) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    config, state = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False), ServerState()
    make = lambda: protocol.BoundedHead(config=config, server_state=state, app_state={}, head_seconds=head_seconds)  # noqa: E731
    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()
        server.close()


async def answer(*parts: bytes, head_seconds: float = 30.0) -> bytes:
    async with connection(head_seconds) as (reader, writer):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.02)
        return await asyncio.wait_for(reader.read(), 10)


@pytest.mark.parametrize(
    "endless", [GET + b"X-A: ", GET + b"X-A: a\r\n" * 100, b"GET /"], ids=["one header", "many headers", "the path"]
)
def test_a_head_without_end_is_refused(endless):
    found = asyncio.run(answer(endless, *[b"a" * 22_000] * 3))
    assert found.startswith(b"HTTP/1.1 431 ") and b'"error_code":507' in found


@pytest.mark.parametrize(
    "head", [GET + b"X-A: a\r\n" * 300, GET + b"X-A: " + b"a" * 100_000, b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n"]
)
def test_a_whole_head_that_is_too_long_is_refused(head):
    found = asyncio.run(answer(head + b"\r\n"))
    assert found.startswith(b"HTTP/1.1 431 ") and b"256 fields" in found
    assert (
        asyncio.run(answer(GET + b"X-A: a\r\n" * 250 + b"X-B: " + b"b" * 50_000 + b"\r\nConnection: close\r\n\r\n"))[9:12] == b"200"
    )


@pytest.mark.parametrize("start", [b"", b"GET / HT", GET + b"X-A: b"])
def test_a_head_that_does_not_come_is_refused(start):
    assert asyncio.run(answer(start, head_seconds=0.05)).startswith(b"HTTP/1.1 408 ")


def test_garbage_is_refused_in_json():
    found = asyncio.run(answer(b"\x16\x03\x01garbage\r\n\r\n"))
    assert found.startswith(b"HTTP/1.1 400 ") and b'"error_code":507' in found


UPGRADE = b"POST /echo HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
WHOLE = UPGRADE + b"Content-Length: 7\r\n\r\npayload"
CHUNKS = UPGRADE + b"Transfer-Encoding: chunked\r\n\r\n3\r\npay\r\n4\r\nload\r\n0\r\n\r\n"
LAST = b"POST /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 4\r\n\r\nlast"


@pytest.mark.parametrize("request_", [WHOLE, CHUNKS], ids=["whole", "chunks"])
@pytest.mark.parametrize("cut", [None, 20, -9, -3], ids=["uncut", "in the head", "before the body's end", "at the end"])
def test_a_request_to_upgrade_is_answered_with_its_body(request_, cut):
    found = asyncio.run(answer(request_[:cut], (request_[cut:] if cut else b"") + request_ + LAST))
    assert found.count(b"HTTP/1.1 200 OK") == 3 and found.count(b"\r\n\r\npayload") == 2 and found.endswith(b"last")


def test_a_proxy_is_not_played():
    assert asyncio.run(answer(b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n")).startswith(b"HTTP/1.1 400 ")


def test_long_bodies_and_requests_sent_ahead_are_no_head():
    """The second head is cut in the middle, and comes to its end only after the first answer took longer than a head may."""

    async def run() -> bytes:
        async with connection(0.2) as (reader, writer):
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\n\r\n" + b"a" * 200_000 + GET)
            found = await reader.readuntil(b"ab")
            writer.write(b"Connection: close\r\n\r\n")
            return found + await asyncio.wait_for(reader.read(), 10)

    assert asyncio.run(run()).count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize("asks", [b"", b"Connection: keep-alive\r\n"])
def test_a_stream_in_http_1_0_ends_with_the_connection(asks):
    head, _, body = asyncio.run(answer(b"GET /stream HTTP/1.0\r\n" + asks + b"\r\n")).partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower() and b"connection: close" in head.lower() and body == b"ab"
    head, _, body = asyncio.run(answer(b"GET / HTTP/1.0\r\n" + asks + b"\r\n")).partition(b"\r\n\r\n")
    assert b"content-length: 2" in head.lower() and body == b"ab"
    head, _, body = asyncio.run(answer(b"HEAD /stream HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")
    assert b" 200 " in head and not body


def test_a_stream_in_http_1_1_is_chunked():
    """The first part comes before the second is made, in both; here each is a chunk."""
    found = asyncio.run(answer(b"GET /stream HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))
    assert b"transfer-encoding: chunked" in found and found.endswith(b"\r\n\r\n1\r\na\r\n1\r\nb\r\n0\r\n\r\n")


def test_a_stream_in_http_1_0_is_not_held_back():
    async def run() -> tuple[bytes, bytes]:
        async with connection() as (reader, writer):
            writer.write(b"GET /stream HTTP/1.0\r\n\r\n")
            return await reader.readuntil(b"\r\n\r\na"), await reader.read(1)

    first, second = asyncio.run(run())
    assert first.endswith(b"a") and second == b"b"
