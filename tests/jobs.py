"""Requests to an engine, driven as the server drives it, and what came back."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from maga_transformer import _core

NEW_TOKENS = 8


@dataclass
class Output:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)
    finish: str = ""
    cached_tokens: int = 0

    @property
    def text(self) -> tuple[list[int], list[tuple[float, list[tuple[int, float]]]], str]:
        return self.tokens, self.logprobs, self.finish


@dataclass
class Job:
    prompt: Sequence[int]
    sequences: int = 1
    params: dict[str, Any] = field(default_factory=dict)


class Harness:
    def __init__(self, engine: _core.Engine) -> None:
        self.engine = engine
        self.outputs: dict[int, list[Output]] = {}

    def submit(self, job: Job, **options: Any) -> int:
        params = _core.SamplingParams(**{"max_new_tokens": NEW_TOKENS, "logprobs": 5, **job.params})
        request = self.engine.submit(np.asarray(job.prompt, np.int32), params, sequences=job.sequences, **options)
        self.outputs[request] = [Output() for _ in range(job.sequences)]
        return request

    def collect(self) -> bool:
        """Returns whether there was news."""
        select.select([self.engine.event_fd()], [], [], 1.0)
        events = self.engine.poll()
        for event in events:
            output = self.outputs[event.request][event.sequence]
            output.tokens += event.tokens
            output.logprobs += event.logprobs
            output.finish, output.cached_tokens = event.finish, event.cached_tokens
        self.stats()
        return bool(events)

    def stats(self) -> dict[str, Any]:
        stats = self.engine.stats()
        assert stats["pages_live"] + stats["pages_cached"] + stats["pages_free"] == stats["pages_total"]
        return stats

    def finish(self) -> None:
        last = time.monotonic()
        while not all(output.finish for outputs in self.outputs.values() for output in outputs):
            assert time.monotonic() < last + 120, "the engine is stuck"
            if self.collect():
                last = time.monotonic()
        stats = self.stats()
        assert (stats["running"], stats["waiting"], stats["pages_live"]) == (0, 0, 0)
        assert stats["finished"] + stats["cancelled"] + stats["failed"] == stats["requests"] == len(self.outputs)

    def run(self, jobs: Sequence[Job]) -> list[list[Output]]:
        """All at once; the outputs of every job."""
        requests = [self.submit(job) for job in jobs]
        self.finish()
        return [self.outputs[request] for request in requests]


def assert_equal(found: Sequence[Sequence[Output]], expected: Sequence[Sequence[Output]]) -> None:
    for job, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert [output.text for output in ours] == [output.text for output in theirs], f"job {job}"
