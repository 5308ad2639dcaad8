"""Every op, and whole programs, on a GPU in each type that it computes in, against the reference backend (double precision) on
inputs and weights rounded to that type."""

import dataclasses
import functools

import numpy as np
import pytest
from cards import CARDS, COMPUTE, card, needs_card
from maga_transformer import _core

from .attention_cases import RopeForm
from .case import Case
from .cases import CASES, LARGE_CASES, build
from .harness import distance, expected_rounded, load, reference, rounded_case, run
from .test_ops import NAN_CASES, rounds_to_codes
from .test_transformer import Model, assert_close, at_once, in_chunks, one_by_one, over_given_pages, sequences
from .transformer import SHAPES, Shape, transformer
from .weights import Form, matrix, stack

pytestmark = needs_card

# Half a unit in the last place is 2e-3 of an element in bf16 and 2.4e-4 in fp16; an op may round once inside. fp32: sums of up to
# some thousand terms, and fast exponentials.
TOLERANCE = {"fp32": 1e-4, "bf16": 1.5e-2, "fp16": 2e-3}
# The softmax turns rounded queries and keys (normalised heads are as long as sqrt(head_dim)) into weights, and those are rounded
# before they meet the values.
ATTENTION_TOLERANCE = {"fp32": 1e-4, "bf16": 1e-1, "fp16": 1.25e-2}
# Where the last bit of a key decides about its 8-bit code: a step of that code, before the softmax.
CODES = {"int8": 6e-2, "fp8_e4m3": 0.5, "fp8_e5m2": 0.8}
# Kernels that multiply codes have scales and offsets in the compute type too, and gated ones multiply the errors of two results;
# those of fp8 round tokens as well, with a scale for each 512 columns where there are more than 64.
WEIGHT_CODES = {"bf16": 6e-2, "fp16": 8e-3}
FP8 = 0.15
# Of a whole program, as root mean square.
PROGRAM_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 6e-3}
# Where logits of a router are close, one arithmetic takes another expert than the next: measured, up to 4e-2 for a sequence.
EXPERTS_TOLERANCE = {"fp32": 1e-4, "bf16": 1e-1, "fp16": 1e-1}

_PAGES = [name for name in CASES if not name.startswith("attention") or build(name).page_tokens in (16, 32, 64)]


@pytest.mark.parametrize("name", [*_PAGES, *LARGE_CASES])
@pytest.mark.parametrize("compute", COMPUTE)
def test_op(compute: str, name: str) -> None:
    case = rounded_case(name, compute)
    got = run(load(card(compute), case), case)
    assert distance(got, expected_rounded(name, compute, card(compute))) < tolerance_of_op(case, compute)


def tolerance_of_op(case: Case, compute: str) -> float:
    attends = any(op["op"] == "attention" for op in case.program.ops)
    most = [(ATTENTION_TOLERANCE if attends else TOLERANCE)[compute]]
    if case.kv_dtype in CODES and (compute != "fp32" or rounds_to_codes(case)):
        most.append(CODES[case.kv_dtype])
    multiplied = {data.form.kind for data in case.weights if not data.pack(card(compute), "weight").widened}
    if "affine" in multiplied:
        most.append(WEIGHT_CODES[compute])
    if "fp8" in multiplied:
        most.append(FP8)
    return max(most)


@pytest.mark.parametrize(
    "name",
    [
        "linear-bf16-1024x4096-x13",
        "attention-128-4over2-long-fp32-pages16",
        "norm-rms-576-by576-x4",
        "moe-bf16-512x384x512-2of8-x64-renormalise1-residual-apart",
    ],
)
@pytest.mark.parametrize("compute", COMPUTE)
def test_twice_is_the_same(compute: str, name: str) -> None:
    """Bit for bit: no result hangs on the order in which blocks finish."""
    case = rounded_case(name, compute)
    executable = load(card(compute), case)
    first, second = run(executable, case), run(executable, case)
    for once, again in zip(first, second, strict=True):
        for value, data in once.items():
            np.testing.assert_array_equal(again[value], data)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", NAN_CASES)
@pytest.mark.parametrize("compute", COMPUTE)
def test_bad_number_stays_visible_and_in_its_sequence(compute: str, name: str, bad: float) -> None:
    """An element that is not finite spoils its own token (in attention also later ones of its sequence), and nothing else."""
    case = rounded_case(name, compute)
    good = run(load(card(compute), case), case)[-1]
    last = case.runs[-1]
    token = 1 if len(last.step["kv_length"]) == 1 else last.step["sequence_start"][4]  # of a sequence of one token
    last.inputs[min(last.inputs)][token, 3] = bad
    got = run(load(card(compute), case), case)[-1]
    attends = any(op["op"] == "attention" for op in case.program.ops)
    others = [t for t in range(last.tokens) if t < token or (t > token and (not attends or len(last.step["kv_length"]) > 1))]
    if not (name.startswith(("activation", "add", "bound")) and bad != np.nan):  # those may turn an infinity into a number
        assert not np.isfinite(got[max(got)][token]).all()
    for result, want in zip(got.values(), good.values(), strict=True):
        np.testing.assert_array_equal(result[others], want[others])


# Wide enough for the kernels of few tokens and the partial sums that they leave to the next kernel.
WIDE = [
    Shape("llama-wide", Form("bf16"), hidden=1024, heads=16, kv_heads=4, head_dim=64, mlp=2816, rope=RopeForm(64)),
    Shape("qwen2-wide", Form("fp16"), hidden=1024, heads=8, kv_heads=1, head_dim=128, mlp=1536, bias=True, rope=RopeForm(128)),
    Shape(
        "llama-wide-4bit", Form("affine", 4, 128, points=True), hidden=1024, heads=16, kv_heads=4, head_dim=64, mlp=2816,
        rope=RopeForm(64),
    ),
    Shape(
        "qwen2-wide-8bit", Form("affine", 8, zero=128), hidden=1024, heads=8, kv_heads=1, head_dim=128, mlp=1536, bias=True,
        rope=RopeForm(128),
    ),
    Shape(
        "qwen3-wide", Form("affine", 4, 32, True), hidden=2048, heads=16, kv_heads=8, head_dim=128, mlp=1024, head_norms=True,
        rope=RopeForm(128),
    ),
]  # fmt: skip


def tolerance_of(shape: Shape) -> dict[str, float]:
    return EXPERTS_TOLERANCE if shape.experts else PROGRAM_TOLERANCE


@functools.cache
def expected(shape: Shape, compute: str) -> dict[int, np.ndarray]:
    program, weights = transformer(shape)
    return Model(reference(), program, [data.rounded(compute) for data in weights]).logits(one_by_one())


@pytest.mark.parametrize("shape", [*SHAPES, *WIDE], ids=str)
@pytest.mark.parametrize("compute", COMPUTE)
def test_program_is_reference_whatever_the_schedule(compute: str, shape: Shape) -> None:
    model = Model(card(compute), *transformer(shape), kv_dtype=compute)
    for schedule in (at_once(), one_by_one(), in_chunks(1), in_chunks(5), in_chunks(16)):
        assert_close(model.logits(schedule), expected(shape, compute), tolerance_of(shape)[compute])


# Of 8-bit keys and values: codes that differ by one, in a 127th, an 8th or a 4th of a number.
CODE_TOLERANCE = {"int8": 2e-2, "fp8_e4m3": 4e-2, "fp8_e5m2": 8e-2}


@pytest.mark.parametrize("kv_dtype", [*CODE_TOLERANCE, "mixed"])
@pytest.mark.parametrize("shape", WIDE, ids=str)
@pytest.mark.parametrize("compute", COMPUTE)
def test_program_over_codes_is_reference(compute: str, shape: Shape, kv_dtype: str) -> None:
    dtypes = ["int8", compute] if kv_dtype == "mixed" else [kv_dtype] * shape.layers
    program, weights = transformer(shape)
    want = Model(reference(), program, [data.rounded(compute) for data in weights], kv_dtype=dtypes).logits(one_by_one())
    model = Model(card(compute), *transformer(shape), kv_dtype=dtypes)
    for schedule in (at_once(), in_chunks(1), in_chunks(16)):
        assert_close(model.logits(schedule), want, tolerance_of(shape)[compute] + CODE_TOLERANCE.get(kv_dtype, 2e-2))


@pytest.mark.parametrize("shape", [*SHAPES, *WIDE], ids=str)
@pytest.mark.parametrize("compute", COMPUTE)
def test_program_without_fusion_is_reference(compute: str, shape: Shape) -> None:
    model = Model(card(compute), *transformer(shape, every_value=True), kv_dtype=compute)
    names = [op["op"] for op in model.executable.program.ops]
    assert "add" in names and "activation" in names and "gated_linear" not in names
    for schedule in (at_once(), in_chunks(1)):
        assert_close(model.logits(schedule), expected(shape, compute), tolerance_of(shape)[compute])


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.experts], ids=str)
@pytest.mark.parametrize("compute", COMPUTE)
def test_experts_in_graphs(compute: str, shape: Shape) -> None:
    """Three sequences run in the graph of four, again and again, over other experts than those of the steps between. Other kernels
    may do the linears of a graph's batch, so it is near to what they give one by one, and to itself the same."""
    model = Model(card(compute), *transformer(shape), kv_dtype=compute)
    model.logits(at_once())
    spans = [[(0, 44, 45), (2, 15, 16), (3, 32, 33)], [(4, 6, 7)], [(4, 5, 6), (3, 20, 21), (0, 30, 31), (2, 3, 4)]]
    steps = [model.tables.step(each, sequences()) for each in spans]
    want = []
    for step in steps:
        model.executable.run(**step)
        want.append(model.executable.logits())
    first: list[np.ndarray] = []
    for i in range(3 * len(steps)):
        step = steps[i % len(steps)]
        model.executable.enqueue([_core.Draw(row=row) for row in range(len(step["ids"]))], **step)
        model.executable.collect()
        got = model.executable.logits()
        if i < len(steps):
            assert_close({0: got}, {0: want[i]}, EXPERTS_TOLERANCE[compute])
            first.append(got)
        np.testing.assert_array_equal(got, first[i % len(steps)])


@pytest.mark.parametrize("compute", COMPUTE)
def test_copied_page_continues_alike(compute: str) -> None:
    """A fork: the last page is copied, the sequence goes on over the copy, and its original is spoilt."""
    model = Model(card(compute), *transformer(SHAPES[0]), kv_dtype=compute)
    model.logits([[(0, 0, 44)]])
    want = model.logits([[(0, 44, 45)]])[0][44]
    table = model.tables.tables[0]
    unused = next(page for page in range(model.tables.pages) if all(page not in t for t in model.tables.tables))
    model.logits([[(0, 0, 44)]])
    model.executable.copy_page(table[-1], unused)
    model.executable.run(**model.tables.step([(0, 32, 40)], [[7] * 45]))
    table[-1] = unused
    np.testing.assert_array_equal(model.logits([[(0, 44, 45)]])[0][44], want)


@pytest.mark.parametrize("kv_dtype", ["", *CODE_TOLERANCE])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("compute", COMPUTE)
def test_given_pages_are_read(compute: str, shape: Shape, kv_dtype: str) -> None:
    program, weights = transformer(shape)
    want = over_given_pages(Model(reference(), program, [data.rounded(compute) for data in weights], kv_dtype=kv_dtype or "fp32"))
    got = over_given_pages(Model(card(compute), program, weights, kv_dtype=kv_dtype or compute))
    assert_close({0: got}, {0: want}, tolerance_of(shape)[compute] + CODE_TOLERANCE.get(kv_dtype, 0.0))


@pytest.mark.parametrize(
    ("form", "bytes_of_8x128"),
    [
        (Form("affine", 4, 128, zero=8), 512 + 16),
        (Form("affine", 4, 128, points=True), 512 + 32),
        (Form("affine", 4, 32, True), 512 + 2 * 64),
        (Form("affine", 3, 32, points=True), 512 + 64),
        (Form("affine", 8, 0, zero=128), 1024 + 16),
        (Form("affine", 6, 32, zero=32), 1024 + 64),
    ],
    ids=str,
)
def test_codes_stay_codes(form: Form, bytes_of_8x128: int) -> None:
    weight = matrix(np.random.default_rng(0), 36, 384, form).pack(card("bf16"), "some.weight")
    if CARDS[0].capability < 80:
        assert weight.widened
        return
    assert weight.widened == "" and weight.bytes == 5 * 3 * bytes_of_8x128


def test_why_codes_are_widened() -> None:
    rng = np.random.default_rng(0)
    four = Form("affine", 4, 128, zero=8)
    assert matrix(rng, 16, 384, four).pack(card("fp32"), "w").widened
    assert stack(rng, 2, 24, 384, four).pack(card("bf16"), "w").widened
    assert matrix(rng, 16, 240, Form("affine", 4, 16)).pack(card("bf16"), "w").widened
    some = matrix(rng, 16, 384, four)
    assert some.scale is not None
    tiny = dataclasses.replace(some, scale=some.scale * np.float32(1e-4))
    assert tiny.pack(card("fp16"), "w").widened


def test_experts_stay_codes_while_one_layout_holds_them() -> None:
    rng = np.random.default_rng(0)
    points = Form("affine", 4, 128, points=True)
    forms = [points, Form("affine", 4, 128, zero=8), points]  # zeros of groups hold those of the whole tensor
    experts = [matrix(rng, 32, 384, form) for form in forms]
    widened = [*experts, matrix(rng, 32, 384, Form("affine", 8, 0, zero=128))]
    for chosen, codes in ((experts, CARDS[0].capability >= 80), (widened, False)):
        stacked = card("bf16").stack("w", [len(chosen), 32, 384])
        for data in chosen:
            stacked.add_affine(data.values, **data.numbers())
        weight = stacked.finish()
        assert (weight.widened == "") == codes
        assert weight.bytes == len(chosen) * (4 * 3 * (512 + 32) if codes else 32 * 384 * 2)


def test_pages_of_an_odd_size_are_refused() -> None:
    program, weights = transformer(SHAPES[0])
    with pytest.raises(ValueError, match="48"):
        Model(card("fp32"), program, weights, page_tokens=48)
