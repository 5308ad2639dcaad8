"""What the goals share: servers under watch, their figures, and how a goal says that it does not hold."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from server.conftest import ServerProcess, running_server
from soak.load import Ask, Client, Said

Result = TypeVar("Result")

SETTINGS = {
    "LOAD_FORMAT": "dummy",
    "KV_CACHE_MEM_MB": "1",  # a few sequences fit: they evict and preempt each other
    "SEQ_SIZE_PER_BLOCK": "16",
    "MAX_SEQ_LEN": "256",
    "MAX_QUEUE": "1024",
    "ACT_TYPE": "fp32",
    "FT_SERVER_TEST": "0",
    "THREADS": "1",
}
WEIGHTS_MIB = 1  # of the model that load.py writes
ALLOWED_MIB = 300  # beside weights and pages


class Missed(AssertionError):
    pass


def need(holds: object, told: str) -> None:
    if not holds:
        raise Missed(told)


@dataclass
class Soak:
    model: Path
    scratch: Path
    scale: float  # 1: sizes for CI
    seed: int
    said: list[Said] = field(default_factory=list)  # by the server that rows share, for the books
    sick: list[str] = field(default_factory=list)  # health answers other than ok, where none was due
    alarms: float = 0  # stalls that the watchdog counted, where none was due
    peaks: list[tuple[float, float]] = field(default_factory=list)  # of every server: MiB at most, MiB of its pages

    def size(self, count: int) -> int:
        return max(1, round(count * self.scale))

    @contextmanager
    def server(self, **settings: str) -> Iterator[ServerProcess]:
        merged = {**SETTINGS, **settings}
        with running_server(self.model, **merged) as server:
            yield server
            if server.process.poll() is None:
                self.peaks.append((memory(server, "VmHWM"), float(merged["KV_CACHE_MEM_MB"])))

    @contextmanager
    def watched(self, server: ServerProcess) -> Iterator[None]:
        """Health is asked all the time, by a thread of its own: it must be well."""
        end = threading.Event()

        def look() -> None:
            while not end.wait(0.25):
                answer = server.get("/health")
                if answer.status_code != 200:
                    self.sick.append(answer.text)

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()
        self.alarms += server.gauges()["maga_watchdog_stalls_total"]


def busy(gauges: dict[str, float]) -> dict[str, float]:
    names = ("maga_num_requests_running", "maga_num_requests_waiting", 'maga_kv_pages{state="live"}')
    return {name: gauges[name] for name in names if gauges[name]}


def settled(server: ServerProcess, seconds: float = 20.0) -> dict[str, float]:
    """The gauges, once nothing runs or waits, no page is held and the door has seen every request off."""
    end = time.monotonic() + seconds
    while True:
        gauges = server.gauges()
        inside = gauges["maga_http_requests_received_total"] - answered(gauges)
        if not busy(gauges) and not inside:
            return gauges
        need(time.monotonic() < end, f"after {seconds:.0f} s: {busy(gauges)}, {inside:.0f} requests inside")
        time.sleep(0.05)


def answered(gauges: dict[str, float]) -> float:
    return sum(value for name, value in gauges.items() if name.startswith("maga_http_requests_answered_total"))


def memory(server: ServerProcess, line: str) -> float:
    """MiB, of a line of /proc/PID/status."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return next(int(row.split()[1]) / 1024 for row in status.splitlines() if row.startswith(line))


def open_files(server: ServerProcess) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def go(url: str, work: Callable[[Client], Awaitable[Result]]) -> Result:
    async def run() -> Result:
        async with Client(url) as client:
            return await work(client)

    return asyncio.run(run())


def say(server: ServerProcess, asks: Sequence[Ask], at_once: int) -> list[Said]:
    """In the order of `asks`."""
    return go(server.url, lambda client: client.say_all(asks, at_once))


def all_well(said: Sequence[Said]) -> None:
    """Every answer that its client waited for came whole."""
    lost = [one for one in said if not one.left and not one.well]
    need(not lost, f"{len(lost)} of {len(said)} did not end well: {lost[0].status if lost else ''} {lost[0].error if lost else ''}")


def same(said: Sequence[Said], others: Sequence[Said], where: str) -> None:
    for one, other in zip(said, others, strict=True):
        need(one.texts == other.texts, f"{where}: {other.texts} instead of {one.texts} for {one.ask.body}")


def stop(server: ServerProcess, seconds: float = 30.0) -> int:
    """Its exit status after SIGTERM."""
    server.process.send_signal(signal.SIGTERM)
    return server.process.wait(seconds)
