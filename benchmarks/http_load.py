"""The load of benchmarks/serve.py: many streams of `/v1/completions` at once from one process, with little CPU time of its own.

The client shares the machine with the server it measures, so it is plain sockets and searches in bytes: no HTTP library, no JSON.
"""

import json
import re
import selectors
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import numpy as np

_PIECE = b'"choices":[{'
_USAGE = re.compile(rb'"completion_tokens":(\d+)')
_DONE = b"data: [DONE]"
_END = b"0\r\n\r\n"  # of a chunked answer
_SECONDS = 600.0  # that no stream may be silent


@dataclass(frozen=True)
class Load:
    requests: int
    concurrency: int
    tokens_in: int
    tokens_out: int
    vocab: int
    seed: int

    def prompts(self) -> list[list[int]]:
        shape = (self.requests, self.tokens_in)
        return np.random.default_rng(self.seed).integers(0, self.vocab, shape).tolist()  # type: ignore[no-any-return]

    def share(self, client: int, clients: int) -> "Load":
        """What one of several clients asks."""
        requests, concurrency = (len(range(client, all_, clients)) for all_ in (self.requests, self.concurrency))
        return Load(requests, concurrency, self.tokens_in, self.tokens_out, self.vocab, self.seed * 1000 + client)


@dataclass
class Seen:
    """By one client or by all of them. Times in seconds."""

    first: list[float] = field(default_factory=list)  # from sending a request to its first token
    between: list[float] = field(default_factory=list)  # pieces of one stream; a piece is a token unless the server joins some
    tokens: int = 0
    cpu: float = 0.0  # of the clients
    begun: float = float("inf")  # clock of the machine, which all processes share
    ended: float = 0.0

    def add(self, other: "Seen") -> None:
        self.first += other.first
        self.between += other.between
        self.tokens += other.tokens
        self.cpu += other.cpu
        self.begun, self.ended = min(self.begun, other.begun), max(self.ended, other.ended)

    @property
    def seconds(self) -> float:
        return self.ended - self.begun


def client(url: str, model: str, load: Load) -> Seen:
    """Asks everything, `load.concurrency` streams at a time."""
    bodies = (_request(url, model, load, prompt) for prompt in load.prompts())
    seen, selector = Seen(), selectors.DefaultSelector()
    cpu, seen.begun = time.process_time(), time.monotonic()
    for _ in range(min(load.concurrency, load.requests)):
        lane = _Lane(url, bodies, seen)
        selector.register(lane.socket, selectors.EVENT_READ, lane)
    while selector.get_map():
        ready = selector.select(_SECONDS)
        if not ready:
            raise RuntimeError(f"{url} has sent nothing for {_SECONDS:.0f} s")
        for key, _ in ready:
            if not key.data.read():
                selector.unregister(key.fileobj)
                key.data.socket.close()
    seen.ended, seen.cpu = time.monotonic(), time.process_time() - cpu
    return seen


class _Lane:
    """One connection, which asks one thing after another."""

    def __init__(self, url: str, requests: Iterator[bytes], seen: Seen) -> None:
        place = urlsplit(url)
        self.socket = socket.create_connection((place.hostname or "", place.port or 80), timeout=60)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._requests, self._seen = requests, seen
        self._ask(next(requests))

    def _ask(self, request: bytes) -> None:
        self.socket.sendall(request)
        self._asked = self._last = time.monotonic()
        self._pieces = 0
        self._rest, self._head, self._done = b"", True, False

    def read(self) -> bool:
        """Takes what has come. False: there is nothing more to ask."""
        data = self.socket.recv(1 << 18)
        if not data:
            raise RuntimeError(
                f"the server closed a stream after {self._pieces} pieces: {self._rest[-500:].decode(errors='replace')}"
            )
        data = self._rest + data
        if self._head and len(data) > 12:
            if not data.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(data[:1000].decode(errors="replace"))
            self._head = False
        end = data.rfind(b"\n\n") + 2  # whole events only: a search must not miss what two reads share
        if end >= 2:
            self._take(data, end)
            self._rest = data[end:]
        else:
            self._rest = data
        if not (self._done and data.endswith(_END)):
            return True
        request = next(self._requests, None)
        if request is not None:
            self._ask(request)
        return request is not None

    def _take(self, data: bytes, end: int) -> None:
        pieces, seen = data.count(_PIECE, 0, end), self._seen
        if pieces:
            now = time.monotonic()
            if self._pieces:
                seen.between.append(now - self._last)
            else:
                seen.first.append(now - self._asked)
            seen.between += [0.0] * (pieces - 1)
            self._last, self._pieces = now, self._pieces + pieces
        if usage := _USAGE.search(data, 0, end):
            seen.tokens += int(usage[1])
        if data.find(b'"error":', 0, end) >= 0:
            raise RuntimeError(data[:1000].decode(errors="replace"))
        self._done = data.find(_DONE, 0, end) >= 0


def _request(url: str, model: str, load: Load, prompt: list[int]) -> bytes:
    body = json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": load.tokens_out,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
