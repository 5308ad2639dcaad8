"""What an op case is made of: a program of one op, weights, and ragged steps over pages with their inputs."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from maga_transformer._core import Program, View

from .weights import WeightData, dense

PAGE_TOKENS = 16


@dataclass
class Run:
    """A step and what is written into input values before it."""

    step: dict[str, Any]
    inputs: dict[int, np.ndarray] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return len(self.step["ids"])


@dataclass
class Case:
    program: Program
    weights: list[WeightData]
    runs: list[Run]
    outputs: list[View]  # what is kept and compared
    page_tokens: int = PAGE_TOKENS
    kv_dtype: str = "fp32"
    # Inputs that a backend with quantised activations rounds, and to blocks of how many columns.
    quantized_inputs: tuple[int, ...] = ()
    block: int = 32
    fp8_inputs: tuple[View, ...] = ()  # what a backend that multiplies fp8 codes rounds to e4m3

    @property
    def limits(self) -> dict[str, Any]:
        return {
            "tokens": max(run.tokens for run in self.runs),
            "sequences": max(len(run.step["kv_length"]) for run in self.runs),
            "logit_rows": max(max(len(run.step["logit_rows"]) for run in self.runs), 1),
            "pages": max(max(run.step["pages"]) for run in self.runs) + 1,
            "page_tokens": self.page_tokens,
            "kv_dtype": self.kv_dtype,
        }


Builder = Callable[[np.random.Generator], Case]


class PageTables:
    """Sequences over a pool of pages in random order; steps of any span of any of them."""

    def __init__(self, rng: np.random.Generator, lengths: list[int], page_tokens: int = PAGE_TOKENS) -> None:
        counts = [-(-length // page_tokens) for length in lengths]
        self.pages = sum(counts) + 2  # two that nobody uses
        order = rng.permutation(self.pages).tolist()
        ends = list(itertools.accumulate(counts, initial=0))
        self.tables = [order[a:b] for a, b in itertools.pairwise(ends)]
        self.page_tokens = page_tokens

    def step(
        self,
        spans: list[tuple[int, int, int]],
        ids: list[list[int]] | None = None,
        logit_rows: list[int] | None = None,
        prompt_length: list[int] | None = None,
    ) -> dict[str, Any]:
        """`spans`: (sequence, first token, end). `ids`: all tokens of every sequence. Logits by default: of each span's last."""
        sizes = [end - begin for _, begin, end in spans]
        starts = list(itertools.accumulate(sizes, initial=0))
        used = [self.tables[s][: -(-end // self.page_tokens)] for s, _, end in spans]
        return {
            "ids": [t for s, begin, end in spans for t in (ids[s][begin:end] if ids else [0] * (end - begin))],
            "positions": [p for _, begin, end in spans for p in range(begin, end)],
            "sequence_start": starts,
            "kv_length": [end for _, _, end in spans],
            "page_start": list(itertools.accumulate(map(len, used), initial=0)),
            "pages": [page for table in used for page in table],
            "logit_rows": [end - 1 for begin, end in itertools.pairwise(starts) if end > begin]
            if logit_rows is None
            else logit_rows,
            "prompt_length": prompt_length if prompt_length is not None else [0] * len(spans),
        }


def plain_step(tokens: int, rng: np.random.Generator, vocab: int = 1) -> dict[str, Any]:
    """For ops that look at rows only: one sequence."""
    ids = [rng.integers(0, vocab, tokens).tolist()]
    return PageTables(rng, [tokens]).step([(0, 0, tokens)], ids)


def rows(rng: np.random.Generator, count: int, width: int) -> np.ndarray:
    return rng.normal(0.1, 1, (count, width)).astype(np.float32)


def apart_from_ties(rng: np.random.Generator, count: int, width: int, block: int) -> np.ndarray:
    """Rows whose int8 rounding per block (absmax / 127, to nearest) does not hang on the last bit of a division."""
    padded = -(-width // block) * block
    codes = rng.integers(-126, 127, (count, padded // block, block)).astype(np.float64)
    values = codes + rng.uniform(-0.45, 0.45, codes.shape)
    values[..., 0] = rng.choice([-127, 127], codes.shape[:2])  # the largest of its block
    size = rng.uniform(0.2, 3, codes.shape[:2])[..., None] / 127
    return (values * size).reshape(count, padded)[:, :width].astype(np.float32)


def quantize_rows(x: np.ndarray, block: int) -> np.ndarray:
    """What is left of x after int8 rounding per block of columns."""
    count, width = x.shape
    padded = np.zeros((count, -(-width // block) * block))
    padded[:, :width] = x
    blocks = padded.reshape(count, -1, block)
    d = np.abs(blocks).max(-1, keepdims=True) / 127
    codes = np.rint(np.divide(blocks, d, out=np.zeros_like(blocks), where=d > 0))
    return (codes * d).reshape(count, -1)[:, :width].astype(np.float32)


class OpProgram:
    """A program of one op: inputs, weights and outputs by name."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.program = Program()
        self.program.family = "case"
        self.program.vocab = 1  # for ops without ids, which are zero then
        self.weights: list[WeightData] = []
        self.outputs: list[View] = []

    def input(self, name: str, width: int) -> View:
        return self.program.input(name, width)

    def output(self, name: str, width: int, of_rows: str = "tokens") -> View:
        return self.keep(self.program.value(name, width, of_rows))

    def keep(self, view: View) -> View:
        self.program.output(view)
        self.outputs.append(view)
        return view

    def weight(self, data: WeightData) -> int:
        self.weights.append(data)
        return self.program.weight(f"weight{len(self.weights)}", ["-"], list(data.shape))

    def vector(self, size: int, mean: float = 0.0) -> int:
        return self.weight(dense(self.rng, (size,), mean=mean))

    def case(self, runs: list[Run], **extra: Any) -> Case:
        return Case(self.program, self.weights, runs, self.outputs, **extra)
