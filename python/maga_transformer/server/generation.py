"""One HTTP request's way through the engine: jobs in, deltas out, and everything cancelled when the request goes away."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from maga_transformer.output import Delta, SequenceText
from maga_transformer.request import Fault, Job, RequestError
from maga_transformer.runtime import Runtime
from maga_transformer.server.log import current
from maga_transformer.structured import NOT_FOLLOWED

if TYPE_CHECKING:
    from maga_transformer._core import Event


_NOTHING_LEFT = "no token can be chosen"  # begins the engine's error (cpp/engine/loop_finish.cpp)


class Generation:
    """Use as a context manager: leaving it cancels what still runs. Jobs come from `Runtime.prepare`."""

    def __init__(self, runtime: Runtime, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.texts = [[SequenceText(runtime.tokenizer, job.sampling) for _ in range(job.sequences)] for job in jobs]
        # Of each job's prompt: value, rank and the most likely tokens of every token but the first. Complete before any text comes.
        self.prompt_logprobs: list[list[tuple[float, int, list[tuple[int, float]]]]] = [[] for _ in jobs]
        # Of each job's outputs, where they are asked for.
        self.logprobs: list[list[list[tuple[float, list[tuple[int, float]]]]]] = [
            [[] for _ in range(job.sequences)] for job in jobs
        ]
        self.last_events: list[list[Event | None]] = [[None] * job.sequences for job in jobs]
        self._runtime = runtime
        self._news: list[tuple[int, Event]] = []  # that nobody has asked for yet
        self._awaited: asyncio.Future[None] | None = None  # the next news, by whoever waits for it
        self._requests: list[int] = []
        self._running = sum(job.sequences for job in jobs)
        record = current.get()
        if record:
            record.generations.append(self)
        try:
            for index, job in enumerate(jobs):
                self._requests.append(runtime.submit(job, functools.partial(self._put, index)))
        except RequestError:
            self.cancel()
            raise

    @property
    def submitted(self) -> bool:
        """Whether the engine has got all of it."""
        return len(self._requests) == len(self.jobs)

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cancel()

    def cancel(self) -> None:
        if self._running:
            for request in self._requests:
                self._runtime.cancel(request)

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """All news since the last turn, at least one, until every sequence has ended. Raises RequestError if one fails."""
        while self._running:
            if not self._news:
                self._awaited = asyncio.get_running_loop().create_future()
                await self._awaited
            news, self._news = self._news, []
            yield [self._take(job, event) for job, event in news]

    async def finish(self) -> None:
        async for _ in self.deltas():
            pass

    def event(self, job: int, sequence: int) -> Event:
        event = self.last_events[job][sequence]
        assert event is not None
        return event

    def _put(self, job: int, event: Event) -> None:
        self._news.append((job, event))
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)

    def _take(self, job: int, event: Event) -> Delta:
        sequence, finish, sampling = event.sequence, event.finish, self.jobs[job].sampling
        self.last_events[job][sequence] = event
        if sampling.logprobs >= 0:
            self.logprobs[job][sequence] += event.logprobs
        if sampling.prompt_logprobs >= 0:
            self.prompt_logprobs[job] += event.prompt_logprobs
        text = self.texts[job][sequence]
        delta = text.push(event)
        if finish:
            self._running -= 1
            if finish not in ("stop", "length"):
                raise failure(event)
        return Delta(job, event, delta, text.stop)


def failure(event: Event) -> RequestError:
    """Of an event that ended otherwise than by itself."""
    if event.finish == "timeout":
        return RequestError(
            Fault.timeout, f"the request's time ran out after {event.total_seconds:.3f} s and {event.output_tokens} tokens"
        )
    if event.finish == "cancelled":
        return RequestError(Fault.cancelled, "the request was cancelled: the server is shutting down")
    if event.error.startswith((NOT_FOLLOWED, _NOTHING_LEFT)):  # what the client asked for, not a fault of the server
        return RequestError(Fault.parameter, event.error)
    return RequestError(Fault.execution, event.error or "the engine gave the request up")
