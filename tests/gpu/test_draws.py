"""Tokens that the card chooses itself: the same as the host's sampler from the same logits, and steps queued behind each other."""

from typing import Any

import numpy as np
import pytest
from cards import card, needs_card
from maga_transformer import _core
from ops.case import PageTables
from ops.test_transformer import LENGTHS, Model, sequences
from ops.transformer import SHAPES, transformer
from ops.weights import dense

pytestmark = needs_card

ROWS = 64
sampler = _core.testing.sampler


class Head:
    """Embedding and head only: token t gives row t of random logits."""

    def __init__(self, vocab: int, spread: float) -> None:
        rng = np.random.default_rng(vocab)
        self.program = _core.Program()
        self.program.family, self.program.vocab, self.program.max_positions = "head", vocab, 64
        x, y = self.program.value("x", 64), self.program.value("y", 64, "logits")
        out = self.program.value("logits", vocab, "logits")
        self.program.embed(x, self.program.weight("table", ["-"], [vocab, 64]))
        self.program.select(y, x)
        self.program.linear(out, y, weight=self.program.weight("head", ["-"], [vocab, 64]))
        self.program.logits = out.value
        weights = [dense(rng, (vocab, 64)), dense(rng, (vocab, 64), deviation=spread / 8)]
        backend = card("fp32")
        packed = [data.pack(backend, name) for data, name in zip(weights, ("table", "head"), strict=True)]
        self.model = backend.load(
            self.program, packed, tokens=ROWS, sequences=ROWS, logit_rows=ROWS, pages=ROWS + 2, page_tokens=16, kv_dtype="fp32"
        )
        tables = PageTables(rng, [1] * ROWS)
        self.step = tables.step([(s, 0, 1) for s in range(ROWS)], rng.integers(0, vocab, (ROWS, 1)).tolist())

    def draw(self, **params: Any) -> tuple[list[tuple[int, bool]], np.ndarray]:
        draws = [_core.Draw(row=row, seed=7, stream=row, index=row % 5, **params) for row in range(ROWS)]
        self.model.enqueue(draws, **self.step)
        return self.model.collect(), self.model.logits()


@pytest.mark.parametrize("vocab, spread", [(97, 1.0), (5000, 2.0), (128256, 3.0)])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 1},
        {"temperature": 0.3},
        {"temperature": 2, "top_k": 1},
        {"temperature": 1, "top_k": 40},
        {"temperature": 1, "top_p": 0.9},
        {"temperature": 1.5, "min_p": 0.05},
        {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
    ],
    ids=str,
)
def test_the_card_draws_what_the_host_draws(params: dict[str, Any], vocab: int, spread: float) -> None:
    drawn, logits = Head(vocab, spread).draw(**params)
    assert logits.shape == (ROWS, vocab)
    settings = _core.SamplingParams(**params, seed=7)
    wanted = [sampler.sample(logits[row], settings, [], [0] * (row % 5), stream=row)[1] for row in range(ROWS)]
    assert all(finite for _, finite in drawn)
    same = sum(token == want for (token, _), want in zip(drawn, wanted, strict=True))
    # A number that falls within rounding of the border between two tokens may take either.
    assert same >= (ROWS if params["temperature"] == 0 or params.get("top_k") == 1 else ROWS - 2)


def test_a_row_that_is_not_finite_is_reported() -> None:
    head = Head(97, float("nan"))
    drawn, _ = head.draw(temperature=0.0)
    assert not any(finite for _, finite in drawn)


def test_ties_go_to_the_first() -> None:
    drawn, logits = Head(97, 0.0).draw(temperature=0.0)
    assert (logits == 0).all() and all(token == 0 for token, _ in drawn)


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_a_step_queued_behind_another_takes_its_tokens(compute: str) -> None:
    """Prefill, then decode steps whose ids are what the step before chooses, two in flight; against one step at a time."""
    program, weights = transformer(SHAPES[0])
    model = Model(card(compute), program, weights, kv_dtype=compute)
    assert model.executable.asynchronous
    steps, spans = 6, [(s, 0, length - 8) for s, length in enumerate(LENGTHS) if length > 8]
    draws = [_core.Draw(row=row, temperature=0.9, seed=3, stream=row) for row in range(len(spans))]

    def decode(ids: list[int], count: int) -> dict[str, Any]:
        step = model.tables.step([(s, end + count, end + count + 1) for s, _, end in spans])
        return step | {"ids": ids}

    model.executable.enqueue(draws, **model.tables.step(spans, sequences()))
    one_by_one = [[token for token, _ in model.executable.collect()]]
    for count in range(steps):
        model.executable.enqueue(draws, **decode(one_by_one[-1], count))
        one_by_one.append([token for token, _ in model.executable.collect()])

    model.executable.enqueue(draws, **model.tables.step(spans, sequences()))
    ahead = []
    for count in range(steps):
        model.executable.enqueue(draws, **decode([-1 - i for i in range(len(spans))], count))
        ahead.append([token for token, _ in model.executable.collect()])
    ahead.append([token for token, _ in model.executable.collect()])
    assert ahead == one_by_one
    assert len({tuple(tokens) for tokens in ahead}) > 1
