"""Streams and bodies without a server: silence, errors after the head, clients that leave, bodies that never come."""

import asyncio
from types import SimpleNamespace

import pytest
from maga_transformer.request import Fault, RequestError
from maga_transformer.server import body, streaming
from maga_transformer.server.errors import openai_error
from maga_transformer.server.state import State
from starlette.requests import Request


class _Connection:
    """Records what is sent; `leave()` disconnects."""

    def __init__(self):
        self.sent = []
        self._left = asyncio.Event()

    async def send(self, message):
        self.sent.append(message)

    async def receive(self):
        await self._left.wait()
        return {"type": "http.disconnect"}

    def leave(self):
        self._left.set()

    @property
    def content(self):
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def complete(self):
        return self.sent[-1].get("more_body") is False


async def _serve(events, connection, **options):
    closed = []
    stream = streaming.EventStream(
        events,
        lambda error: streaming.openai_event(openai_error(error)),
        on_close=lambda: closed.append(True),
        **{"keep_alive": False, **options},
    )
    await stream({"type": "http"}, connection.receive, connection.send)
    assert closed == [True]


def test_events_in_order_and_an_end():
    async def run():
        async def events():
            yield b"data: 1\n\n"
            yield b"data: 2\n\n"

        connection = _Connection()
        await _serve(events(), connection)
        assert connection.content == b"data: 1\n\ndata: 2\n\n" and connection.complete

    asyncio.run(run())


@pytest.mark.parametrize(
    "error, word", [(RequestError(Fault.timeout, "too late"), b"too late"), (KeyError("secret"), b"internal error")]
)
def test_an_error_after_the_head_is_the_last_event(error, word):
    async def run():
        async def events():
            yield b"data: 1\n\n"
            raise error

        connection = _Connection()
        await _serve(events(), connection)
        assert word in connection.content and b"secret" not in connection.content and connection.complete

    asyncio.run(run())


def test_silence_is_broken_by_comments(monkeypatch):
    monkeypatch.setattr(streaming, "KEEP_ALIVE_SECONDS", 0.01)

    async def run():
        connection = _Connection()

        async def events():
            while b": keep-alive\n\n" not in connection.content:
                await asyncio.sleep(0.005)
            yield b"data: 1\n\n"

        await asyncio.wait_for(_serve(events(), connection, keep_alive=True), 10)
        assert connection.content.endswith(b"data: 1\n\n")

    asyncio.run(run())


def test_a_client_that_leaves_ends_the_work_at_once():
    async def run():
        cancelled = []

        async def events():
            yield b"data: 1\n\n"
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(True)
                raise

        connection = _Connection()
        serving = asyncio.ensure_future(_serve(events(), connection))
        while not connection.content:
            await asyncio.sleep(0)
        connection.leave()
        await asyncio.wait_for(serving, 10)
        assert cancelled == [True] and not connection.complete

    asyncio.run(run())


def test_an_answer_nobody_waits_for():
    async def run():
        connection, cancelled = _Connection(), []

        async def work():
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.append(True)

        connection.leave()
        with pytest.raises(streaming.ClientGone):
            await streaming.unless_gone(Request({"type": "http"}, connection.receive), work())
        assert cancelled == [True]

        async def quick():
            return 7

        assert await streaming.unless_gone(Request({"type": "http"}, _Connection().receive), quick()) == 7

    asyncio.run(run())


@pytest.mark.parametrize("gap", [None, 0.001])
def test_a_body_that_never_comes(gap):
    """Silent, or slower than a body may be."""
    runtime = SimpleNamespace(config=SimpleNamespace(read_timeout=0.02))
    app = SimpleNamespace(state=SimpleNamespace(maga=State(runtime, None, None, None, None, None, None)))

    async def run():
        async def receive():
            await asyncio.sleep(1000 if gap is None else gap)
            return {"type": "http.request", "body": b"a", "more_body": True}

        with pytest.raises(RequestError) as error:
            await body.json_object(Request({"type": "http", "headers": [], "app": app}, receive), 10_000)
        assert error.value.fault is Fault.slow_body and "READ_TIMEOUT" in error.value.message

    asyncio.run(run())
