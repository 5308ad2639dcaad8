"""Load on a server over HTTP: many streams at once, output tokens a second, and how long clients wait.

    python benchmarks/serve.py http://localhost:8088 [--concurrency 256 --requests 1000 --in 512 --out 128]
    python benchmarks/serve.py --start benchmarks/shapes/llama-3-8b.json -- --load-format dummy     # a server of its own

Streams `/v1/completions` with prompts of random token ids, greedy, past end-of-text tokens; any server with vLLM's fields of that
route can be measured. The clients are processes of their own (--clients), so that they do not hold up what they measure.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

import httpx
import numpy as np


@dataclass(frozen=True)
class Load:
    url: str
    model: str
    requests: int
    concurrency: int
    tokens_in: int
    tokens_out: int
    vocab: int
    seed: int


@dataclass
class Seen:
    """By one client or by all of them. Times in seconds."""

    first: list[float] = field(default_factory=list)  # from sending a request to its first token
    between: list[float] = field(default_factory=list)  # pieces of one stream; a piece is a token unless the server joins some
    tokens: int = 0
    begun: float = float("inf")  # clock of the machine, which all processes share
    ended: float = 0.0

    def add(self, other: "Seen") -> None:
        self.first += other.first
        self.between += other.between
        self.tokens += other.tokens
        self.begun, self.ended = min(self.begun, other.begun), max(self.ended, other.ended)


def client(load: Load) -> Seen:
    return asyncio.run(_client(load))


async def _client(load: Load) -> Seen:
    prompts = np.random.default_rng(load.seed).integers(0, load.vocab, (load.requests, load.tokens_in)).tolist()
    waiting = iter(prompts)
    seen = Seen()
    limits = httpx.Limits(max_connections=load.concurrency, max_keepalive_connections=load.concurrency)
    async with httpx.AsyncClient(base_url=load.url, timeout=600, limits=limits, trust_env=False) as http:

        async def lane() -> None:
            for prompt in waiting:
                await _stream(http, load, prompt, seen)

        seen.begun = time.monotonic()
        await asyncio.gather(*(lane() for _ in range(min(load.concurrency, load.requests))))
        seen.ended = time.monotonic()
    return seen


async def _stream(http: httpx.AsyncClient, load: Load, prompt: list[int], seen: Seen) -> None:
    body = {
        "model": load.model,
        "prompt": prompt,
        "max_tokens": load.tokens_out,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    last = time.monotonic()
    pieces = 0
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {(await answer.aread()).decode()[:500]}")
        rest = b""
        async for data in answer.aiter_raw():
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if not line.startswith(b"data: {"):
                    continue
                if b'"choices":[{' in line:
                    now = time.monotonic()
                    (seen.between if pieces else seen.first).append(now - last)
                    last, pieces = now, pieces + 1
                elif b'"usage"' in line:
                    seen.tokens += json.loads(line[6:])["usage"]["completion_tokens"]
                elif b'"error"' in line:
                    raise RuntimeError(line.decode()[:500])


def measure(url: str, args: argparse.Namespace, requests: int, seed: int) -> Seen:
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
    clients = max(1, min(args.clients, args.concurrency, requests))
    loads = [
        Load(
            url=url,
            model=model,
            requests=len(range(i, requests, clients)),
            concurrency=len(range(i, args.concurrency, clients)),
            tokens_in=args.tokens_in,
            tokens_out=args.tokens_out,
            vocab=args.vocab,
            seed=seed * 1000 + i,
        )
        for i in range(clients)
    ]
    total = Seen()
    with ProcessPoolExecutor(clients, mp_context=get_context("spawn")) as pool:
        for seen in pool.map(client, loads):
            total.add(seen)
    return total


@contextlib.contextmanager
def server(path: str, settings: list[str]) -> Iterator[str]:
    """A server on a free port, and its address. What it prints goes on to stderr."""
    environment = {**os.environ, "START_PORT": "0", "MAGA_HOST": "127.0.0.1"}
    command = [sys.executable, "-m", "maga_transformer.start_server", path, *settings]
    process = subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE)
    address: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", file=sys.stderr)
            if line.startswith("ready "):
                address.append(line.split()[-1])
                ready.set()
        ready.set()

    threading.Thread(target=read, daemon=True).start()
    try:
        ready.wait()
        if not address:
            sys.exit("the server ended; its messages are above")
        yield address[0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def report(seen: Seen, args: argparse.Namespace) -> None:
    seconds = seen.ended - seen.begun
    print(
        f"{args.requests} requests, {args.concurrency} at once, {args.tokens_in} tokens in, {args.tokens_out} out: "
        f"{seen.tokens / seconds:,.0f} output tokens/s, {args.requests / seconds:.1f} requests/s, {seconds:.1f} s"
    )
    for label, values in (("first token", seen.first), ("between tokens", seen.between)):
        p50, p90, p99 = (np.percentile(values, (50, 90, 99)) * 1e3).tolist() if values else (0.0, 0.0, 0.0)
        print(f"{label:15} p50 {p50:9.2f} ms   p90 {p90:9.2f} ms   p99 {p99:9.2f} ms")
    wanted = args.requests * args.tokens_out
    if seen.tokens != wanted:
        print(f"note: {wanted} output tokens were asked for, {seen.tokens} came")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", nargs="?", default="http://localhost:8088")
    parser.add_argument("--start", metavar="MODEL", help="start a server for this model; settings for it follow after --")
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--in", dest="tokens_in", type=int, default=512)
    parser.add_argument("--out", dest="tokens_out", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=32000, help="prompt ids are below this")
    parser.add_argument("--clients", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)), help="processes that ask")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    args = parser.parse_args(own)
    settings = sys.argv[len(own) + 2 :]
    with server(args.start, settings) if args.start else contextlib.nullcontext(args.url) as url:
        measure(url, args, min(args.requests, args.concurrency), seed=1)  # warm
        report(measure(url, args, args.requests, seed=2), args)


if __name__ == "__main__":
    main()
