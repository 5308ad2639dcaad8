"""The thread that computes masks: many outputs at once, at different places of the same grammar."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from maga_transformer.structured.compiler import Compiled
from maga_transformer.structured.masks import MaskWorker

TOKENS = [b"<eos>", *(bytes([letter]) for letter in range(32, 127))]


class Vocabulary:
    eos_token_id, bos_token_id, tokens, special_token_ids = 0, None, TOKENS, [0]

    def __call__(self, text: str) -> list[int]:
        return [TOKENS.index(bytes([letter])) for letter in text.encode()]


class Queue:
    """Stands for the engine: hands out what is put in, keeps what comes back."""

    def __init__(self) -> None:
        self.asked: queue.Queue[list[Any]] = queue.Queue()
        self.answers: queue.Queue[tuple[Any, str]] = queue.Queue()

    def take(self) -> list[Any]:
        return self.asked.get()

    def close(self) -> None:
        self.asked.put([])

    def ready(self, mask: Any, allowed: np.ndarray) -> None:
        bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")[: len(TOKENS)]
        self.answers.put((mask, b"".join(TOKENS[token] for token in np.flatnonzero(bits)).decode()))

    def complete(self, mask: Any) -> None:
        self.answers.put((mask, "complete"))

    def fail(self, mask: Any, error: str) -> None:
        self.answers.put((mask, error))

    def ask(self, masks: list[Any]) -> list[str]:
        self.asked.put(masks)
        found = {id(mask): answer for mask, answer in (self.answers.get(timeout=20) for _ in masks)}
        return [found[id(mask)] for mask in masks]


@pytest.mark.parametrize("count", [2, 12])
def test_outputs_that_begin_together_with_one_grammar(count: int) -> None:
    """Their first masks are those of the same matcher, which other threads must not be given twice."""
    tokenizer = LLTokenizer(TokenizerWrapper(Vocabulary()))
    shared, other = (
        Compiled(LLMatcher(tokenizer, LLMatcher.grammar_from_regex(pattern), log_level=0), b"") for pattern in ("[ab]c+|d", "[xy]z")
    )
    asked = Queue()
    worker = MaskWorker(asked, TOKENS)  # type: ignore[arg-type]
    keys = [worker.register(shared if index % 3 else other) for index in range(count)]
    starts = [SimpleNamespace(grammar=key, output=0, last_token=-1) for key in keys]
    assert asked.ask(starts) == ["abd" if index % 3 else "xy" for index in range(count)]
    letters = [b"xad"[index % 3 : index % 3 + 1] for index in range(count)]
    turns = [SimpleNamespace(grammar=key, output=0, last_token=TOKENS.index(a)) for key, a in zip(keys, letters, strict=True)]
    assert asked.ask(turns) == [["z", "c", "complete"][index % 3] for index in range(count)]
    asked.asked.put([])  # ends the thread
