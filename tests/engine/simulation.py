"""What the fake model (cpp/bindings/fake_model.h) makes the engine say, computed the slow and obvious way."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from maga_transformer import _core

testing = _core.testing
sampler = testing.sampler
MASK = (1 << 64) - 1


def fold(value: int, entry: int) -> int:
    value = ((value ^ entry) * 0x9E3779B97F4A7C15) & MASK
    return value ^ (value >> 29)


def entry(token: int, position: int, prompt_length: int, length_dependent_from: int, is_long: bool = False) -> int:
    length = max(prompt_length, position + 1)
    long_rope = length_dependent_from > 0 and length >= length_dependent_from
    return ((length << 32) if long_rope else (is_long << 63)) + token + 1


def logits_of(value: int, vocab: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        x = np.uint64(value) + np.arange(vocab, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95)
        x = (x ^ (x >> np.uint64(32))) * np.uint64(0xAF251AF3B0F025B5)
        x = x ^ (x >> np.uint64(32))
    return ((x >> np.uint64(40)).astype(np.float64) * 2.0**-21 - 4).astype(np.float32)


@dataclass
class Output:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)
    prompt_logprobs: list[tuple[float, int, list[tuple[int, float]]]] = field(default_factory=list)
    logits: list[list[float]] = field(default_factory=list)
    finish: str = ""
    stop: tuple[int, int, int] = (-1, -1, -1)
    error: str = ""
    cached_tokens: int = 0
    steps: int = 0
    wait_seconds: float = 0.0


@dataclass
class World:
    """The model and limits that engine and simulation share."""

    vocab: int = 64
    pages: int = 32
    page_tokens: int = 4
    token_budget: int = 32
    max_sequences: int = 8
    length_dependent_from: int = 0
    long_from: int = 0
    poison: int = -1
    max_sequence_length: int = 0
    vocabulary: list[bytes] | None = None
    embeds: bool = False
    logit_rows: int = 0  # 0: max_sequences
    asynchronous: ClassVar[bool] = False  # set by the fixture `device`

    @property
    def longest(self) -> int:
        pool = self.pages * self.page_tokens
        return min(self.max_sequence_length, pool) if self.max_sequence_length else pool

    def engine(self, **options: object) -> Harness:
        return Harness(self, **options)

    def logits(self, prompt: int, tokens: Sequence[int]) -> np.ndarray:
        """Behind `tokens`, the first of which are the prompt."""
        value = 0
        for position, token in enumerate(tokens):
            is_long = self.long_from > 0 and len(tokens) >= self.long_from
            value = fold(value, entry(token, position, prompt, self.length_dependent_from, is_long))
        return logits_of(value, self.vocab)

    def simulate(self, prompt: Sequence[int], params: _core.SamplingParams, stream: int = 0) -> Output:
        """One sequence alone: the whole chain of stages comes from the sampler, which has tests of its own."""
        output = Output()
        matcher = testing.StopMatcher(params, self.vocabulary or [])
        while True:
            if self.poison >= 0 and self.poison in [*prompt, *output.tokens]:
                output.finish, output.error = "error", "non-finite logits"
                return output
            row = self.logits(len(prompt), [*prompt, *output.tokens])
            status, token, logprob, top = sampler.sample(row, params, list(prompt), output.tokens, stream=stream)
            assert status == "ok"
            output.tokens.append(token)
            if params.logprobs >= 0:
                output.logprobs.append((logprob, top))
            output.stop = matcher.append(token)
            length = len(prompt) + len(output.tokens)
            if max(output.stop) >= 0:
                output.finish = "stop"
            elif len(output.tokens) >= params.max_new_tokens or length >= self.longest:
                output.finish = "length"
            if output.finish:
                return output


class Harness:
    """An engine over a fake model, and what its events add up to."""

    def __init__(
        self, world: World, *, threads: int = 1, max_queue: int = 1000, prefix_cache: bool = True, fault: str = ""
    ) -> None:
        model, self.control = testing.fake_model(
            vocab=world.vocab,
            pages=world.pages,
            page_tokens=world.page_tokens,
            tokens=world.token_budget,
            sequences=world.max_sequences,
            logit_rows=world.logit_rows or world.max_sequences,
            length_dependent_from=world.length_dependent_from,
            long_from=world.long_from,
            poison=world.poison,
            asynchronous=world.asynchronous,
            embeds=world.embeds,
        )
        self.engine = _core.Engine(
            testing.fake_backend(threads),
            model,
            max_sequences=world.max_sequences,
            token_budget=world.token_budget,
            max_queue=max_queue,
            max_sequence_length=world.max_sequence_length,
            prefix_cache=prefix_cache,
            fault=fault,
        )
        if world.vocabulary is not None:
            self.engine.set_vocabulary(world.vocabulary)
        self.outputs: dict[tuple[int, int], Output] = {}
        self.expected: set[tuple[int, int]] = set()

    def __del__(self) -> None:
        self.control.release()  # a test that failed must not leave the engine's destructor waiting

    def submit(self, prompt: Sequence[int], params: _core.SamplingParams, *, sequences: int = 1, **options: object) -> int:
        request = self.engine.submit(np.asarray(prompt, dtype=np.int32), params, sequences=sequences, **options)
        self.expected |= {(request, i) for i in range(sequences)}
        return request

    def collect(self) -> None:
        for event in self.engine.poll():
            output = self.outputs.setdefault((event.request, event.sequence), Output())
            assert not output.finish, "an event after the end"
            output.tokens += event.tokens
            output.logprobs += event.logprobs
            output.prompt_logprobs += event.prompt_logprobs
            if event.logits.size:
                output.logits.append(event.logits.tolist())
            output.finish, output.error = event.finish, event.error
            output.stop = (event.stop_token, event.stop_word, event.stop_string)
            output.cached_tokens, output.steps, output.wait_seconds = event.cached_tokens, event.steps, event.wait_seconds
            assert event.output_tokens == len(output.tokens)
            stats = self.engine.stats()
            assert stats["pages_live"] + stats["pages_cached"] + stats["pages_free"] == stats["pages_total"]

    def wait_for(self, condition, seconds: float = 60.0) -> None:
        """Waits on the engine's eventfd, as the server does."""
        deadline = time.monotonic() + seconds
        self.collect()
        while not condition():
            assert time.monotonic() < deadline, "the engine is stuck"
            select.select([self.engine.event_fd()], [], [], 1.0)
            self.collect()

    def run(self) -> dict[tuple[int, int], Output]:
        self.wait_for(lambda: all(self.outputs.get(key, Output()).finish for key in self.expected))
        self.check_idle()
        return self.outputs

    def generate(self, prompt: Sequence[int], params: _core.SamplingParams, **options: object) -> Output:
        request = self.submit(prompt, params, **options)
        return self.run()[request, 0]

    def check_idle(self) -> None:
        """With nothing to do, every page is free or cached."""
        stats = self.engine.stats()
        assert (stats["running"], stats["waiting"], stats["pages_live"]) == (0, 0, 0)
        assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]
        assert stats["finished"] + stats["cancelled"] + stats["failed"] == stats["requests"]


def readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])
