"""Whole programs: fused against unfused, and a sequence's logits whatever batch, chunks, pages and threads it meets."""

import functools

import numpy as np
import pytest
from maga_transformer import _core

from .case import PageTables
from .harness import MODES, Mode, reference
from .transformer import SHAPES, VOCAB, Shape, transformer

LENGTHS = [45, 1, 16, 33, 7]
FUSED_ALL = {"linear_residual": True, "gated_linear": True, "prepare_qkv": True}


@functools.cache
def sequences() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, VOCAB, length).tolist() for length in LENGTHS]


class Model:
    """A loaded transformer, and logits of every token of all sequences by any schedule."""

    def __init__(
        self,
        backend: _core.Backend,
        program: _core.Program,
        weights: list,
        kv_dtype: str | list[str] = "fp32",
        page_tokens: int = 16,
    ) -> None:
        self.tables = PageTables(np.random.default_rng(page_tokens), LENGTHS, page_tokens)
        packed = [data.pack(backend, f"weight{i}") for i, data in enumerate(weights)]
        total = sum(LENGTHS)
        self.executable = backend.load(
            program,
            packed,
            tokens=total,
            sequences=len(LENGTHS),
            logit_rows=total,
            pages=self.tables.pages,
            page_tokens=page_tokens,
            kv_dtype=kv_dtype,
        )

    def logits(self, schedule: list[list[tuple[int, int, int]]]) -> dict[int, np.ndarray]:
        """`schedule`: the spans of each step. (tokens, vocab) by sequence."""
        out = {s: np.full((LENGTHS[s], VOCAB), np.nan, np.float32) for spans in schedule for s, _, _ in spans}
        for spans in schedule:
            step = self.tables.step(spans, sequences(), prompt_length=[LENGTHS[s] for s, _, _ in spans])
            step["logit_rows"] = list(range(len(step["ids"])))
            self.executable.run(**step)
            rows = self.executable.logits()
            for (s, begin, end), first in zip(spans, step["sequence_start"], strict=False):
                out[s][begin:end] = rows[first : first + end - begin]
        return out


def at_once() -> list[list[tuple[int, int, int]]]:
    return [[(s, 0, length) for s, length in enumerate(LENGTHS)]]


def one_by_one() -> list[list[tuple[int, int, int]]]:
    return [[(s, 0, length)] for s, length in enumerate(LENGTHS)]


def in_chunks(size: int) -> list[list[tuple[int, int, int]]]:
    """Every sequence in pieces of `size` tokens, all in the same steps while they last; the order turns from step to step."""
    steps = []
    for begin in range(0, max(LENGTHS), size):
        spans = [(s, begin, min(begin + size, length)) for s, length in enumerate(LENGTHS) if begin < length]
        steps.append(spans[len(steps) % len(spans) :] + spans[: len(steps) % len(spans)])
    return steps


def assert_close(got: dict[int, np.ndarray], want: dict[int, np.ndarray], tolerance: float) -> None:
    """The root mean square of the difference, relative to that of the logits, for every sequence."""
    for s, w in want.items():
        assert np.isfinite(got[s]).all()
        assert np.sqrt(np.mean((got[s].astype(np.float64) - w) ** 2) / np.mean(w.astype(np.float64) ** 2)) < tolerance


def assert_same(got: dict[int, np.ndarray], want: dict[int, np.ndarray]) -> None:
    for s, w in want.items():
        assert np.isfinite(w).all()
        np.testing.assert_array_equal(got[s], w)


@functools.cache
def expected(shape: Shape) -> dict[int, np.ndarray]:
    return Model(reference(), *transformer(shape)).logits(one_by_one())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference_fused_is_unfused(shape: Shape) -> None:
    program, weights = transformer(shape)
    fused = _core.fuse(program, **FUSED_ALL)
    names = [op["op"] for op in fused.ops]
    assert names.count("prepare_qkv") == shape.layers
    assert (names.count("gated_linear"), names.count("moe")) == (shape.layers - bool(shape.experts), bool(shape.experts))
    assert "add" not in names and "rope" not in names and "activation" not in names
    assert names.count("norm") == 2 * shape.layers + 1
    fused.validate()
    assert_close(Model(reference(), fused, weights).logits(at_once()), expected(shape), 1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference_schedules_agree(shape: Shape) -> None:
    for schedule in (at_once(), in_chunks(1), in_chunks(5)):
        assert_close(Model(reference(), *transformer(shape), page_tokens=8).logits(schedule), expected(shape), 1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_cpu_is_reference(mode: Mode, shape: Shape) -> None:
    got = Model(mode.backend(), *transformer(shape)).logits(at_once())
    assert_close(got, expected(shape), 0.1 if mode.quantized and shape.form.kind == "affine" else 1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_cpu_fused_is_unfused(mode: Mode, shape: Shape) -> None:
    """Bit for bit."""
    fused = Model(mode.backend(), *transformer(shape))
    plain = Model(mode.backend(), *transformer(shape, every_value=True))
    names = [op["op"] for op in plain.executable.program.ops]
    assert "add" in names and "activation" in names and "gated_linear" not in names
    assert_same(fused.logits(at_once()), plain.logits(at_once()))


@pytest.mark.parametrize("kv_dtype", ["fp32", "fp16", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_cpu_batch_changes_nothing(mode: Mode, shape: Shape, kv_dtype: str) -> None:
    """Bit for bit, whatever else is in the step, however a prompt is cut, and on any number of threads."""
    model = Model(mode.backend(), *transformer(shape), kv_dtype=kv_dtype)
    alone = model.logits(one_by_one())
    for schedule in (at_once(), in_chunks(1), in_chunks(5), in_chunks(16)):
        assert_same(model.logits(schedule), alone)
    one_thread = Model(Mode(mode.isa, mode.quantized, threads=1).backend(), *transformer(shape), kv_dtype=kv_dtype)
    assert_same(one_thread.logits(at_once()), alone)


@pytest.mark.parametrize("mode", [None, *MODES], ids=str)
def test_copied_page_continues_alike(mode: Mode | None) -> None:
    """A fork: the last page is copied, the sequence goes on over the copy, and its original is spoilt."""
    program, weights = transformer(SHAPES[0])
    model = Model(mode.backend() if mode else reference(), program, weights)
    want = model.logits([[(0, 0, 45)]])[0][44]
    table = model.tables.tables[0]
    unused = next(page for page in range(model.tables.pages) if all(page not in t for t in model.tables.tables))
    model.logits([[(0, 0, 44)]])
    model.executable.copy_page(table[-1], unused)
    spoilt = model.tables.step([(0, 32, 40)], [[7] * 45])
    model.executable.run(**spoilt)
    table[-1] = unused
    np.testing.assert_array_equal(model.logits([[(0, 44, 45)]])[0][44], want)


def over_given_pages(model: Model) -> np.ndarray:
    """Logits of tokens 20 to 45 of a sequence whose first 20 K/V entries are given."""
    rng = np.random.default_rng(20)
    for i, (kv_heads, head_dim, v_dim) in enumerate(model.executable.program.cache_layers):
        keys, values = (rng.standard_normal((20, kv_heads, width), np.float32) for width in (head_dim, v_dim))
        model.executable.fill_pages(i, keys, values)
    model.tables.tables[0] = list(range(len(model.tables.tables[0])))
    return model.logits([[(0, 20, 45)]])[0][20:]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_given_pages_are_read(mode: Mode, shape: Shape) -> None:
    want = over_given_pages(Model(reference(), *transformer(shape)))
    got = over_given_pages(Model(mode.backend(), *transformer(shape)))
    assert_close({0: got}, {0: want}, 0.1 if mode.quantized and shape.form.kind == "affine" else 1e-5)
