"""A thread that sees whether the engine and the event loop get on, says where they are when they do not, and sums up the work."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from asyncio import AbstractEventLoop
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maga_transformer.runtime import Runtime

log = logging.getLogger(__name__)

_SUMMARY_SECONDS = 10.0


class Progress:
    """Whether something that has work moves on."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._mark: object = None
        self._since = 0.0

    def stuck_seconds(self, mark: object, busy: bool, now: float) -> float:
        """To be asked regularly: how long a busy one has shown the same mark, 0 within the limit."""
        if not busy or mark != self._mark:
            self._mark, self._since = mark, now
        waited = now - self._since
        return waited if waited > self._limit else 0.0


class Watchdog:
    """`stuck` says what stands still and where; "" while all is well."""

    def __init__(self, runtime: Runtime) -> None:
        self.stuck = ""
        self.stalls = 0
        self._runtime = runtime
        limit = runtime.config.stall_timeout
        self._engine, self._loop = Progress(limit), Progress(limit)
        self._every = min(1.0, limit / 4)
        self._beat = 0  # counted by the event loop
        self._asked = 0  # how often it was asked to
        self._end = threading.Event()
        self._summary = Summary(runtime)

    def start(self, loop: AbstractEventLoop) -> None:
        threading.Thread(target=self._watch, args=(loop,), name="maga-watchdog", daemon=True).start()

    def stop(self) -> None:
        self._end.set()

    def _watch(self, loop: AbstractEventLoop) -> None:
        while not self._end.wait(self._every):
            now, stats = time.monotonic(), self._runtime.engine.stats()
            self.look(stats, now)
            if self._beat == self._asked:
                self._asked += 1
                try:
                    loop.call_soon_threadsafe(self._answer)
                except RuntimeError:  # closed
                    return
            self._summary.tell(stats, now)

    def _answer(self) -> None:
        self._beat = self._asked

    def look(self, stats: Mapping[str, Any], now: float) -> None:
        busy = stats["running"] + stats["waiting"] > 0
        engine = self._engine.stuck_seconds(stats["steps"], busy, now)
        loop = self._loop.stuck_seconds(self._beat, self._asked != self._beat, now)
        was, self.stuck = self.stuck, ""
        if engine:
            self.stuck = f"the engine has made no step for {engine:.1f} s: it is in phase {stats['phase']}"
        elif loop:
            self.stuck = f"the event loop has not turned for {loop:.1f} s"
        if self.stuck and not was:
            self.stalls += 1
            log.critical("%s; %s\n%s", self.stuck, _figures(stats), where_everyone_is())
        elif was and not self.stuck:
            log.warning("it goes on")


class Summary:
    """A line in the log every some seconds in which there was work."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._last: Mapping[str, Any] = {}
        self._at = 0.0

    def tell(self, stats: Mapping[str, Any], now: float) -> None:
        if self._last and now - self._at < _SUMMARY_SECONDS:
            return
        before, seconds = self._last, now - self._at
        self._last, self._at = stats, now
        if not before or stats["steps"] == before["steps"]:
            return

        def grown(name: str) -> float:
            return float(stats[name] - before[name])

        busy = grown("model_seconds") + grown("sample_seconds") + grown("host_seconds")
        share = f", {grown('least_seconds') / busy:.0%} of the device's limit" if busy > 0 and grown("least_seconds") > 0 else ""
        log.info(
            "%s; in %.0f s %.1f prompt and %.1f output tokens/s, %d steps%s",
            _figures(stats),
            seconds,
            grown("prompt_tokens") / seconds,
            grown("output_tokens") / seconds,
            grown("steps"),
            share,
        )


def _figures(stats: Mapping[str, Any]) -> str:
    return (
        f"{stats['running']} running, {stats['waiting']} waiting, pages {stats['pages_live']} live, "
        f"{stats['pages_cached']} cached, {stats['pages_free']} free, step {stats['steps']}"
    )


def where_everyone_is() -> str:
    """The stacks of the threads that Python knows, and the kernel's word on all."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            parts.append(f"thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame)).rstrip())
    for task in sorted(Path("/proc/self/task").glob("*")):
        try:
            name, state = (task / "comm").read_text().strip(), (task / "stat").read_text().rpartition(")")[2].split()[0]
            place = (task / "wchan").read_text().strip(" \0\n0")
        except OSError:  # it has ended
            continue
        parts.append(f"task {task.name} {name}: {state} {place}".rstrip())
    return "\n".join(parts)
