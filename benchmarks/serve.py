"""Load on a server over HTTP: many streams at once, output tokens a second, how long clients wait, and what the front end costs.

    python benchmarks/serve.py                                    # the demo model on two cores, beside the engine without HTTP
    python benchmarks/serve.py --start benchmarks/shapes/llama-3-8b.json --concurrency 256 -- --load-format dummy
    python benchmarks/serve.py http://localhost:8088 --in 512 --out 128      # a server that runs already

Streams `/v1/completions` with prompts of random token ids, greedy, past end-of-text tokens; any server with vLLM's fields of that
route can be measured. With a model, rounds alternate between the engine alone (offline_load.py) and a server, each a process of its
own with the same settings. Their speeds depend on what else the machine does; CPU times per token do so little. The server's are
by thread: the engine's are named maga-*, all others are the front end. The clients share the cores and are counted apart.
"""

import argparse
import contextlib
import json
import os
import pathlib
import platform
import signal
import statistics
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context

import numpy as np
from engine import cpu_name
from http_load import Load, Seen, client
from maga_transformer.demo import demo_model
from rich.console import Console
from rich.table import Table

_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ThreadTimes:
    """CPU seconds of a server's threads since they began."""

    engine: float
    front: float

    @staticmethod
    def of(process: int) -> "ThreadTimes":
        seconds = {True: 0.0, False: 0.0}
        for thread in pathlib.Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
                name, _, figures = (thread / "stat").read_text().partition("(")[2].rpartition(") ")
                user, system = figures.split()[11:13]
                seconds[name.startswith("maga-")] += (int(user) + int(system)) / _TICK
        return ThreadTimes(engine=seconds[True], front=seconds[False])


@dataclass(frozen=True)
class Round:
    http: Seen
    threads: ThreadTimes | None = None
    offline: Seen | None = None


def measure(url: str, load: Load, clients: int) -> Seen:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/v1/models", timeout=60) as answer:
        model = json.load(answer)["data"][0]["id"]
    clients = max(1, min(clients, load.concurrency, load.requests))
    total = Seen()
    with ProcessPoolExecutor(clients, mp_context=get_context("spawn")) as pool:
        for seen in pool.map(client, [url] * clients, [model] * clients, [load.share(i, clients) for i in range(clients)]):
            total.add(seen)
    return total


def warm(load: Load) -> Load:
    return replace(load, requests=min(load.requests, load.concurrency), seed=load.seed + 1)


@contextlib.contextmanager
def server(model: str, settings: Sequence[str]) -> Iterator[tuple[str, int]]:
    """A server on a free port: its address and its process. What it prints goes on to stderr."""
    environment = {**os.environ, "START_PORT": "0", "MAGA_HOST": "127.0.0.1"}
    command = [sys.executable, "-m", "maga_transformer.start_server", model, *settings]
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
        yield address[0], process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def online(model: str, settings: Sequence[str], load: Load, clients: int) -> Round:
    with server(model, settings) as (url, process):
        measure(url, warm(load), clients)
        before = ThreadTimes.of(process)
        seen = measure(url, load, clients)
        after = ThreadTimes.of(process)
    return Round(seen, ThreadTimes(engine=after.engine - before.engine, front=after.front - before.front))


def offline(model: str, settings: Sequence[str], load: Load) -> Seen:
    script = pathlib.Path(__file__).with_name("offline_load.py")
    command = [sys.executable, str(script), model, "--load", json.dumps(asdict(load)), *settings]
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if told.returncode:
        sys.exit("the engine ended; its messages are above")
    figures = json.loads(told.stdout.splitlines()[-1])
    return Seen(tokens=figures["tokens"], cpu=figures["cpu"], begun=0.0, ended=figures["seconds"])


def report(rounds: Sequence[Round], load: Load) -> None:
    console = Console(width=132)
    rows = [_row(one) for one in rounds]
    table = Table(title=f"{load.requests} requests, {load.concurrency} at once, {load.tokens_in} tokens in, {load.tokens_out} out")
    for column in ("round", *rows[0]):
        table.add_column(column, justify="right")
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    for label, row in [*((str(at + 1), row) for at, row in enumerate(rows)), ("median", medians)]:
        table.add_row(label, *(f"{value:,.{2 if ' / ' in name else 0}f}" for name, value in row.items()))
    console.print(table)
    for label, values in (
        ("first token", [t for one in rounds for t in one.http.first]),
        ("between tokens", [t for one in rounds for t in one.http.between]),
    ):
        p50, p90, p99 = (np.percentile(values, (50, 90, 99)) * 1e3).tolist() if values else (0.0, 0.0, 0.0)
        console.print(f"{label:15} p50 {p50:9.2f} ms   p90 {p90:9.2f} ms   p99 {p99:9.2f} ms")
    wanted = load.requests * load.tokens_out
    for one in rounds:
        if one.http.tokens != wanted:
            console.print(f"note: {wanted} output tokens were asked for, {one.http.tokens} came")


def _row(one: Round) -> dict[str, float]:
    row: dict[str, float] = {}
    speed = one.http.tokens / one.http.seconds
    if one.offline:
        alone = one.offline.tokens / one.offline.seconds
        row |= {"offline tokens/s": alone, "HTTP tokens/s": speed, "HTTP / offline": speed / alone}
    else:
        row["HTTP tokens/s"] = speed
    client_cpu = one.http.cpu / one.http.tokens * 1e6
    if one.threads:
        engine, front = (seconds / one.http.tokens * 1e6 for seconds in (one.threads.engine, one.threads.front))
        row |= {"front end µs": front, "engine µs": engine}
    row["client µs"] = client_cpu
    if one.offline and one.threads:
        alone = one.offline.cpu / one.offline.tokens * 1e6
        row |= {"offline µs": alone, "offline / HTTP by CPU time": alone / (engine + front + client_cpu)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", nargs="?", help="of a server that runs; without: a server of its own")
    parser.add_argument("--start", metavar="MODEL", help="its model, by default the demo's; settings for it follow after --")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--requests", type=int, help="by default four times the concurrency")
    parser.add_argument("--in", dest="tokens_in", type=int, default=128)
    parser.add_argument("--out", dest="tokens_out", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=32000, help="prompt ids are below this")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--cores", type=int, help="of this machine that server and clients share; by default two for the demo's model, else all"
    )
    parser.add_argument("--clients", type=int, help="processes that ask; by default one for every four cores, at most eight")
    parser.add_argument("--no-offline", action="store_true", help="do not measure the engine without HTTP")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    args = parser.parse_args(own)
    settings = sys.argv[len(own) + 2 :]
    cores = args.cores or (2 if not args.url and not args.start else 0)
    if cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    clients = args.clients or max(1, min(8, len(os.sched_getaffinity(0)) // 4))
    load = Load(args.requests or 4 * args.concurrency, args.concurrency, args.tokens_in, args.tokens_out, args.vocab, seed=1)
    rounds: list[Round] = []
    if args.url:
        measure(args.url, warm(load), clients)
        rounds += [Round(measure(args.url, load, clients)) for _ in range(args.rounds)]
    else:
        model = args.start or str(demo_model())
        for _ in range(args.rounds):
            alone = None if args.no_offline else offline(model, settings, load)
            rounds.append(replace(online(model, settings, load, clients), offline=alone))
    report(rounds, load)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    print(f"{cpu_name()}; {len(os.sched_getaffinity(0))} cores; {platform.platform()}; commit {commit or 'unknown'}")


if __name__ == "__main__":
    main()
