"""Op cases as data, shared by the tests and benchmarks/ops.py. A builder function yields a case's name and how to build it."""

import itertools
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from maga_transformer._core import View

from .attention_cases import RopeForm, attention, log_scale, prepare_qkv, rope, spans_of
from .case import Builder, Case, OpProgram, PageTables, Run, apart_from_ties, plain_step, rows
from .weights import Form, matrix, stack

# --- embed, add_positions, norm, activation, bound, add, select ---


def embed(form: Form, width: int, tokens: int, scale: float) -> Iterator[tuple[str, Builder]]:
    def build(rng: np.random.Generator) -> Case:
        p = OpProgram(rng)
        p.program.vocab = vocab = 83
        p.program.embed(p.output("out", width), p.weight(matrix(rng, vocab, width, form)), scale)
        step = plain_step(tokens, rng, vocab)
        step["ids"][0], step["ids"][-1] = vocab - 1, 0
        return p.case([Run(step)])

    yield f"embed-{form}-{width}-x{tokens}-scale{scale:g}", build


def embed_virtual(form: Form, width: int, scale: float) -> Iterator[tuple[str, Builder]]:
    """Ids behind the vocabulary have a table of their own, whose rows are not scaled."""

    def build(rng: np.random.Generator) -> Case:
        p = OpProgram(rng)
        p.program.vocab = vocab = 83
        p.program.embed(p.output("out", width), p.weight(matrix(rng, vocab, width, form)), scale)
        p.program.add_virtual_tokens(p.weight(matrix(rng, 5, width, Form("fp32"))))
        step = plain_step(9, rng, vocab)
        step["ids"] = [vocab, vocab + 4, 0, vocab - 1, vocab + 2, *step["ids"][5:]]
        return p.case([Run(step)])

    yield f"embed-virtual-{form}-{width}-scale{scale:g}", build


def add_positions(
    form: Form, width: int, spans: str, offset: int, in_place: bool, divisor: int = 1
) -> Iterator[tuple[str, Builder]]:
    def build(rng: np.random.Generator) -> Case:
        p = OpProgram(rng)
        lengths, steps = spans_of(spans)
        wide = p.keep(p.input("in", width + 5))
        view = View(wide.value, 2, width)
        table = p.weight(matrix(rng, -(-max(lengths) // divisor) + offset, width, form))
        p.program.add_positions(view if in_place else p.output("out", width), view, table=table, offset=offset, divisor=divisor)
        step = PageTables(rng, lengths).step(steps[-1])
        return p.case([Run(step, {wide.value: rows(rng, len(step["ids"]), wide.width)})])

    extras = f"{'-in-place' if in_place else ''}{f'-divisor{divisor}' if divisor > 1 else ''}"
    yield f"add_positions-{form}-{width}-{spans}-offset{offset}{extras}", build


def norm(
    kind: str,
    width: int,
    group: int,
    tokens: int,
    *,
    bias: bool = False,
    offset: float = 0.0,
    in_place: bool = False,
    weight: str = "shared",
) -> Any:
    """`weight`: "shared" by the groups, each group's "own", or "no"."""

    def build(rng: np.random.Generator) -> Case:
        p = OpProgram(rng)
        # Columns in the middle of wider values: what stands beside them must stay as it was.
        wide = p.keep(p.input("in", width + 5))
        view = View(wide.value, 2, width)
        out = view if in_place else p.output("out", width)
        size = width if weight == "own" else group
        weights = -1 if weight == "no" else p.vector(size, 1.0)
        p.program.norm(
            out, view, weight=weights, bias=p.vector(size) if bias else -1, kind=kind, eps=1e-5, group=group, weight_offset=offset
        )
        x = rows(rng, tokens, wide.width) * rng.uniform(0.01, 30, (tokens, 1)).astype(np.float32)
        return p.case([Run(plain_step(tokens, rng), {wide.value: x})])

    extras = f"{'-bias' if bias else ''}{f'-offset{offset:g}' if offset else ''}{'-in-place' if in_place else ''}"
    extras += "" if weight == "shared" else f"-{weight}-weight"
    yield f"norm-{kind}-{width}-by{group}-x{tokens}{extras}", build


def activation(kind: str, width: int, tokens: int, *, up: bool = True, in_place: bool = False) -> Iterator[tuple[str, Builder]]:
    def build(rng: np.random.Generator) -> Case:
        p = OpProgram(rng)
        both = p.keep(p.input("both", 2 * width))
        gate, beside = View(both.value, 0, width), View(both.value, width, width)
        p.program.activation(gate if in_place else p.output("out", width), gate, beside if up else None, kind=kind)
        x = rows(rng, tokens, 2 * width) * 4
        x[0, : min(width, 6)] = [0.0, -0.0, 80.0, -80.0, 12.0, -12.0][: min(width, 6)]  # where exp overflows or vanishes
        return p.case([Run(plain_step(tokens, rng), {both.value: x})])

    yield f"activation-{kind}-{width}-x{tokens}{'' if up else '-alone'}{'-in-place' if in_place else ''}", build


def bound(kind: str, limit: float, width: int, tokens: int, *, in_place: bool = False) -> Iterator[tuple[str, Builder]]:
    def build(rng: np.random.Generator) -> Case:
        p = OpProgram(rng)
        wide = p.keep(p.input("in", width + 3))
        view = View(wide.value, 3, width)
        p.program.bound(view if in_place else p.output("out", width), view, kind=kind, limit=limit)
        x = rows(rng, tokens, wide.width) * 2 * limit * rng.uniform(0, 1, (tokens, 1)).astype(np.float32) ** 4
        x[0, 3 : 3 + min(width, 4)] = [0.0, 1e30, -1e30, limit][: min(width, 4)]
        return p.case([Run(plain_step(tokens, rng), {wide.value: x})])

    yield f"bound-{kind}{limit:g}-{width}-x{tokens}{'-in-place' if in_place else ''}", build


def capped_logits(vocab: int, width: int, tokens: int, limit: float) -> Iterator[tuple[str, Builder]]:
    """A bound on the program's logits, which a backend may keep in a type of their own."""

    def build(rng: np.random.Generator) -> Case:
        p = OpProgram(rng)
        x, selected = p.input("x", width), p.program.value("selected", width, "logits")
        p.program.select(selected, x)
        logits = p.output("logits", vocab, "logits")
        p.program.linear(logits, selected, weight=p.weight(matrix(rng, vocab, width, Form("fp32"))))
        p.program.bound(logits, logits, kind="tanh", limit=limit)
        p.program.logits, p.program.vocab = logits.value, vocab
        step = plain_step(tokens, rng, vocab) | {"logit_rows": list(range(0, tokens, 2))}
        return p.case([Run(step, {x.value: rows(rng, tokens, width)})])

    yield f"bound-logits-{vocab}x{width}-x{tokens}", build


def add(width: int, tokens: int, in_place: bool) -> Iterator[tuple[str, Builder]]:
    def build(rng: np.random.Generator) -> Case:
        p = OpProgram(rng)
        a, b = p.keep(p.input("a", width)), p.input("b", width + 3)
        p.program.add(a if in_place else p.output("out", width), a, View(b.value, 3, width))
        return p.case([Run(plain_step(tokens, rng), {a.value: rows(rng, tokens, width), b.value: rows(rng, tokens, width + 3)})])

    yield f"add-{width}-x{tokens}{'-in-place' if in_place else ''}", build


def select(width: int, tokens: int, chosen: list[int]) -> Iterator[tuple[str, Builder]]:
    def build(rng: np.random.Generator) -> Case:
        p = OpProgram(rng)
        x = p.input("x", width + 2)
        p.program.select(p.output("out", width, "logits"), View(x.value, 1, width))
        step = plain_step(tokens, rng) | {"logit_rows": chosen}
        return p.case([Run(step, {x.value: rows(rng, tokens, width + 2)})])

    yield f"select-{width}-{len(chosen)}of{tokens}", build


def pool(width: int, spans: str, kind: str, *, last: bool = False) -> Iterator[tuple[str, Builder]]:
    """`last`: the rows are each sequence's last token; else some token of every other one."""

    def build(rng: np.random.Generator) -> Case:
        p = OpProgram(rng)
        x = p.input("x", width + 2)
        p.program.pool(p.output("out", width, "logits"), View(x.value, 1, width), kind=kind)
        lengths, steps = spans_of(spans)
        step = PageTables(rng, lengths).step(steps[-1])
        if not last:
            starts = list(itertools.pairwise(step["sequence_start"]))[::2]
            step["logit_rows"] = [int(rng.integers(begin, end)) for begin, end in starts if end > begin]
        return p.case([Run(step, {x.value: rows(rng, len(step["ids"]), width + 2)})])

    yield f"pool-{kind}-{width}-{spans}{'-last' if last else ''}", build


# --- linear, gated_linear ---


def linear(
    form: Form, out: int, width: int, tokens: int, *, bias: bool = False, residual: str = "", views: bool = False
) -> Iterator[tuple[str, Builder]]:
    """`residual`: "", "apart" or "in-place". `views`: columns in the middle of wider values."""

    def build(rng: np.random.Generator) -> Case:
        p = OpProgram(rng)
        block = block_of(form, width)
        x = p.input("x", width + (35 if views else 0))
        view = View(x.value, 32 if views else 0, width)
        inputs = {x.value: apart_from_ties(rng, tokens, x.width, block or 32)}
        if residual == "in-place" or views:
            y = p.keep(p.input("y", out + (7 if views else 0)))
            target = View(y.value, 4 if views else 0, out)
            inputs[y.value] = rows(rng, tokens, y.width)
        else:
            target = p.output("y", out)
        added = None
        if residual == "apart":
            r = p.input("r", out)
            inputs[r.value], added = rows(rng, tokens, out), r
        if residual == "in-place":
            added = target
        weight = p.weight(matrix(rng, out, width, form))
        p.program.linear(target, view, weight=weight, bias=p.vector(out) if bias else -1, residual=added)
        quantized = (x.value,) if block else ()
        fp8 = (view,) if form.kind == "fp8" else ()
        return p.case([Run(plain_step(tokens, rng), inputs)], quantized_inputs=quantized, block=block, fp8_inputs=fp8)

    extras = f"{'-bias' if bias else ''}{f'-residual-{residual}' if residual else ''}{'-views' if views else ''}"
    yield f"linear-{form}-{out}x{width}-x{tokens}{extras}", build


def head_linear(
    form: Form, heads: int, out: int, width: int, rest: int, tokens: int, *, views: bool = False
) -> Iterator[tuple[str, Builder]]:
    """`rest`: columns of a head that pass by its matrix."""

    def build(rng: np.random.Generator) -> Case:
        p = OpProgram(rng)
        columns = heads * (width + rest)
        x = p.keep(p.input("x", columns + (5 if views else 0)))
        weight = p.weight(stack(rng, heads, out, width, form))
        p.program.head_linear(p.output("y", heads * (out + rest)), View(x.value, 5 * views, columns), weight=weight, heads=heads)
        return p.case([Run(plain_step(tokens, rng), {x.value: rows(rng, tokens, x.width)})])

    yield f"head_linear-{form}-{heads}x{out}x{width}-rest{rest}-x{tokens}{'-views' * views}", build


def gated_linear(form: Form, out: int, width: int, tokens: int, kind: str, bias: bool = False) -> Iterator[tuple[str, Builder]]:
    def build(rng: np.random.Generator) -> Case:
        p = OpProgram(rng)
        block = block_of(form, width)
        x, y = p.input("x", width), p.output("y", out)
        weight = p.weight(matrix(rng, 2 * out, width, form))
        p.program.gated_linear(y, x, weight=weight, bias=p.vector(2 * out) if bias else -1, kind=kind)
        quantized = (x.value,) if block else ()
        return p.case(
            [Run(plain_step(tokens, rng), {x.value: apart_from_ties(rng, tokens, width, block or 32)})],
            quantized_inputs=quantized,
            block=block,
            fp8_inputs=(x,) if form.kind == "fp8" else (),
        )

    yield f"gated_linear-{form}-{out}x{width}-x{tokens}-{kind}{'-bias' if bias else ''}", build


def block_of(form: Form, width: int) -> int:
    """Columns that share an activation scale: 32, or 16 where several groups of an odd multiple of 16 make up a row; 0:
    activations stay as they are, as the weight is dense or will be (groups that are no multiple of 16)."""
    if form.kind != "affine":
        return 0
    if form.group in (0, width) or form.group % 32 == 0:
        return 32
    return 16 if form.group % 16 == 0 else 0


# --- moe ---


def moe(
    form: Form,
    sizes: tuple[int, int, int],
    experts: int,
    top_k: int,
    tokens: int,
    *,
    bias: bool = False,
    residual: str = "",
    spread: str = "",
    correction: bool = False,
    **options: Any,
) -> Iterator[tuple[str, Builder]]:
    """`sizes`: input, hidden and output. `residual`: "", "apart" or "in-place". `spread`: "one" sends all tokens to one expert,
    "few" to a quarter of them, "ties" makes the logits small whole numbers."""

    def build(rng: np.random.Generator) -> Case:
        p = OpProgram(rng)
        width, hidden, out = sizes
        x, logits = p.input("x", width + 8), p.input("logits", experts + 2)
        inputs = {x.value: rows(rng, tokens, x.width), logits.value: rng.normal(0, 2, (tokens, logits.width)).astype(np.float32)}
        if spread == "one":
            inputs[logits.value][:, 1 + experts // 2] += 50
        elif spread == "few":
            inputs[logits.value][:, 1 + experts // 4 :] -= 50
        elif spread == "ties":
            inputs[logits.value] = np.round(inputs[logits.value] / 2)
        added = target = None
        if residual:
            r = p.input("r", out)
            inputs[r.value], added = rows(rng, tokens, out), r
            target = p.keep(r) if residual == "in-place" else None
        p.program.moe(
            target or p.output("y", out),
            View(x.value, 0, width),
            View(logits.value, 1, experts),
            residual=added,
            gate_up=p.weight(stack(rng, experts, 2 * hidden, width, form)),
            down=p.weight(stack(rng, experts, out, hidden, form)),
            gate_up_bias=p.vector(experts * 2 * hidden) if bias else -1,
            down_bias=p.vector(experts * out) if bias else -1,
            width=hidden,
            experts=experts,
            top_k=top_k,
            correction=p.program.corrections(rng.normal(0, 0.3, experts).tolist()) if correction else -1,
            **{"kind": "silu", **options},
        )
        return p.case([Run(plain_step(tokens, rng), inputs)])

    extras = [f"{key}{value:g}" if isinstance(value, float | int) else str(value) for key, value in options.items()]
    extras += ["bias" * bias, f"residual-{residual}" if residual else "", spread, "correction" * correction]
    name = f"moe-{form}-{'x'.join(map(str, sizes))}-{top_k}of{experts}-x{tokens}"
    yield "-".join(filter(None, [name, *extras])), build


# --- the table ---


def table() -> Iterator[tuple[str, Builder]]:
    dense_forms = [Form(kind) for kind in ("fp32", "fp16", "bf16")]
    every_width = [
        Form("affine", bits, 32, offset, 0 if offset else 2 ** (bits - 1)) for bits in range(2, 9) for offset in (False, True)
    ]
    every_group = [
        Form("affine", bits, group, offset, zero, half)
        for bits, zeros in ((4, (0, 8)), (8, (0, 128)))
        for zero in zeros
        for group in (16, 32, 64, 128, 0)
        for offset, half in ((False, True), (True, True), (True, False))
    ]
    q4 = Form("affine", 4, 32, True)
    q8 = Form("affine", 8, 32, False, 128)

    for form in [*dense_forms, q4, q8, Form("affine", 3, 16, True), Form("affine", 4, 0, False, 8, False)]:
        yield from embed(form, 96, 11, 1.0)
    yield from embed(Form("fp32"), 7, 1, 3.5)
    yield from embed_virtual(Form("bf16"), 7, 3.5)
    yield from embed_virtual(Form("affine", 4, 32, True), 96, 0.25)
    yield from embed(Form("bf16"), 131, 5, 0.25)

    for form, width, spans, offset, in_place in (
        (dense_forms[0], 96, "ragged", 0, False),
        (dense_forms[1], 33, "decodes", 2, True),
        (dense_forms[2], 1024, "prefill", 2, False),
        (q8, 64, "ragged", 1, True),
    ):
        yield from add_positions(form, width, spans, offset, in_place)
    yield from add_positions(dense_forms[0], 48, "ragged", 1, False, divisor=7)

    for kind in ("rms", "layer"):
        for weight, width, bias in (
            ("no", 66, False),
            ("own", 66, False),
            ("own", 768, True),
            ("no", 1024, False),
            ("own", 39, True),
        ):
            yield from norm(kind, width, width // 3 if width % 3 == 0 else width, 5, weight=weight, bias=bias)
        yield from norm(kind, 512, 128, 7, weight="own", offset=1.0, in_place=True)
        for width, tokens in ((1, 3), (7, 1), (64, 5), (100, 33), (576, 4), (1023, 2)):
            yield from norm(kind, width, width, tokens, bias=kind == "layer")
        for group in (64, 80, 96, 128, 256, 37):
            yield from norm(kind, 3 * group, group, 6, in_place=True)
        yield from norm(kind, 66, 66, 4, offset=1.0, bias=True)
        yield from norm(kind, 48, 48, 4, in_place=True)

    for kind in ("silu", "gelu", "gelu_tanh", "relu", "relu2"):
        for width, tokens in ((1, 2), (7, 3), (64, 5), (1000, 7)):
            yield from activation(kind, width, tokens)
        yield from activation(kind, 67, 4, up=False)
        yield from activation(kind, 40, 4, in_place=True)

    for kind, limit in (("clamp", 1.5), ("tanh", 30.0), ("tanh", 0.7)):
        for width, tokens, in_place in ((1, 2, False), (64, 5, True), (1000, 7, False)):
            yield from bound(kind, limit, width, tokens, in_place=in_place)
    yield from capped_logits(131, 64, 9, 5.0)
    yield from capped_logits(256, 576, 70, 30.0)

    for width, tokens, in_place in ((1, 1, False), (7, 3, True), (64, 1, False), (577, 20, True), (577, 20, False)):
        yield from add(width, tokens, in_place)
    for width, tokens, chosen in ((5, 9, [0, 3, 8]), (576, 33, [32]), (64, 4, [0, 1, 2, 3]), (33, 6, [])):
        yield from select(width, tokens, chosen)
    for kind in ("first", "last", "mean"):
        yield from pool(100, "ragged", kind)
        yield from pool(64, "prefill", kind, last=True)

    yield from linears(dense_forms, every_width, every_group)
    for form in [*dense_forms, q4, q8]:
        for options in (
            {"bias": True},
            {"residual": "apart"},
            {"residual": "in-place", "bias": True},
            {"views": True, "residual": "in-place"},
        ):
            for tokens in (1, 6):
                yield from linear(form, 37, 96, tokens, **options)
    for form in [*dense_forms, q4, q8, Form("affine", 6, 16, True)]:
        for kind, out, tokens, bias in (
            ("silu", 48, 1, False),
            ("gelu_tanh", 33, 5, True),
            ("gelu", 100, 37, False),
            ("relu", 1, 2, True),
            ("relu2", 40, 3, False),
        ):
            yield from gated_linear(form, out, 160, tokens, kind, bias)

    for form in (Form("fp8"), Form("fp8", block=(0, 0)), Form("fp8", block=(32, 64))):
        for out, width, tokens in ((48, 96, 1), (64, 304, 13), (160, 576, 64), (96, 272, 100), (37, 100, 6)):
            yield from linear(form, out, width, tokens)
        yield from linear(form, 48, 144, 6, bias=True, residual="in-place")
        yield from linear(form, 64, 96, 70, views=True, residual="apart")
        yield from gated_linear(form, 48, 160, 5, "silu", True)
        yield from gated_linear(form, 40, 144, 80, "gelu")
        yield from gated_linear(form, 33, 160, 3, "relu2")

    yield from moes(dense_forms, [q4, q8])

    for head_dim in (64, 80, 128, 6):
        for interleaved in (False, True):
            yield from rope(RopeForm(head_dim, interleaved), head_dim, 3, "ragged")
    for form in (RopeForm(32), RopeForm(20, True), RopeForm(64, multiplier=1.3), RopeForm(64, dynamic=4.0, max_positions=40)):
        yield from rope(form, 64, 2, "ragged")
        yield from rope(form, 64, 2, "ragged", shift=20000)
    yield from rope(RopeForm(64, dynamic=2.0, max_positions=64), 64, 2, "decodes", prompt=90)
    for form in (RopeForm(64, stepped=True, max_positions=40), RopeForm(48, True, long=True, max_positions=40)):
        for prompt in (0, 41, 80, 81, 400):
            yield from rope(form, 64, 2, "ragged", prompt=prompt)
    for spans in ("ragged", "decodes"):
        yield from rope(RopeForm(32), 64, 2, spans, offset=32)
        yield from rope(RopeForm(20, True, by_block=True), 64, 3, spans, offset=40)
    for width, spans, from_ in ((64, "ragged", 16), (37, "decodes", 40), (1024, "prefill", 20), (96, "far", 2)):
        yield from log_scale(width, spans, from_)

    for head_dim in (64, 80, 96, 128, 256, 37, 1):
        for spans in ("prefill", "decode", "ragged", "decodes"):
            yield from attention(head_dim, 4, 2, spans)
    for heads, kv_heads in ((1, 1), (3, 3), (5, 1), (7, 1), (8, 1), (9, 3), (16, 1), (24, 2)):
        for spans in ("ragged", "decodes"):
            yield from attention(64, heads, kv_heads, spans)
    for window in (1, 7, 16, 40):
        for spans in ("ragged", "decodes", "prefill"):
            yield from attention(64, 4, 2, spans, window=window)
    for kv_dtype, page_tokens in itertools.product(("fp32", "fp16", "bf16"), (16, 48, 64)):
        yield from attention(80, 6, 2, "ragged", kv_dtype=kv_dtype, page_tokens=page_tokens)
    yield from attention(96, 4, 2, "ragged", v_dim=64)
    yield from attention(40, 4, 4, "ragged", v_dim=72, window=9)
    for spans in ("prefill", "ragged", "decodes"):
        yield from attention(64, 8, 2, spans, soft_cap=2.5)
        yield from attention(64, 6, 2, spans, alibi=True)
        yield from attention(64, 4, 1, spans, sinks=True)
        yield from attention(64, 4, 2, spans, tree=True)
        yield from attention(64, 4, 2, spans, context=True)
        yield from attention(80, 4, 1, spans, context=True, alibi=True, kv_dtype="bf16")
    yield from attention(128, 8, 2, "far", sinks=True, alibi=True)
    yield from attention(64, 6, 3, "far", soft_cap=1.0, window=300, tree=True)
    yield from attention(256, 4, 2, "ragged", soft_cap=3.0, sinks=True)
    yield from attention(80, 4, 2, "ragged", alibi=True, tree=True, kv_dtype="fp16")
    for kv_dtype in ("int8", "fp8_e4m3", "fp8_e5m2"):
        for head_dim, spans in itertools.product((64, 80, 96, 128, 256, 37), ("prefill", "ragged", "decodes")):
            yield from attention(head_dim, 4, 2, spans, kv_dtype=kv_dtype)
        for page_tokens in (48, 64):
            yield from attention(112, 6, 2, "ragged", kv_dtype=kv_dtype, page_tokens=page_tokens)
        yield from attention(40, 4, 4, "ragged", v_dim=72, window=9, kv_dtype=kv_dtype)
        yield from attention(64, 16, 1, "far", window=300, sinks=True, kv_dtype=kv_dtype)
        yield from attention(128, 6, 2, "long", soft_cap=2.5, alibi=True, kv_dtype=kv_dtype)
        yield from attention(64, 4, 2, "ragged", tree=True, kv_dtype=kv_dtype)
        yield from attention(80, 4, 1, "ragged", context=True, kv_dtype=kv_dtype)
        for norms, form in (("", None), ("qk", RopeForm(64)), ("k", RopeForm(32, True))):
            yield from prepare_qkv(64, 6, 2, "ragged", norms=norms, form=form, kv_dtype=kv_dtype)
        yield from prepare_qkv(80, 6, 2, "decodes", form=RopeForm(80), kv_dtype=kv_dtype)
    yield from attention(64, 4, 2, "ragged", kv_dtype="fp8_e4m3", scales=(0.005, 0.02))

    for spans in ("prefill", "ragged", "decodes"):
        yield from attention(56, 4, 1, spans, v_dim=40, in_keys=True)
    for kv_dtype, page_tokens in itertools.product(("fp16", "bf16"), (16, 48)):
        yield from attention(72, 20, 1, "ragged", v_dim=64, in_keys=True, kv_dtype=kv_dtype, page_tokens=page_tokens)
    yield from attention(576, 16, 1, "decodes", v_dim=512, in_keys=True, kv_dtype="bf16")
    yield from attention(48, 6, 2, "far", v_dim=37, in_keys=True, window=300, tree=True)
    yield from attention(64, 4, 2, "ragged", v_dim=64, in_keys=True, context=True)
    for form in dense_forms:
        yield from head_linear(form, 4, 20, 12, 8, 9)
        yield from head_linear(form, 3, 131, 70, 0, 40, views=True)
    yield from head_linear(Form("bf16"), 16, 512, 128, 64, 3)
    yield from head_linear(Form("bf16"), 16, 128, 512, 0, 1)

    for head_dim in (64, 80, 128, 38):
        for norms in ("", "q", "k", "qk"):
            for form in (None, RopeForm(head_dim), RopeForm(head_dim // 4 * 2, True)):
                yield from prepare_qkv(head_dim, 6, 2, "ragged", norms=norms, form=form)
    yield from prepare_qkv(64, 4, 4, "decodes", norms="qk", form=RopeForm(64, multiplier=0.7), offset=1.0)
    yield from prepare_qkv(64, 4, 1, "decodes", form=RopeForm(64, dynamic=2.0, max_positions=30))


def moes(dense_forms: list[Form], quantized_forms: list[Form]) -> Iterator[tuple[str, Builder]]:
    bf16 = Form("bf16")
    for form in [*dense_forms, *quantized_forms]:
        for tokens in (1, 3, 40):
            yield from moe(form, (64, 96, 64), 8, 2, tokens, renormalise=True)
    for sizes in ((33, 7, 5), (40, 24, 56), (8, 8, 8), (1, 1, 1), (72, 200, 129)):
        for tokens in (1, 19):
            yield from moe(bf16, sizes, 5, 3, tokens, bias=True, residual="apart")
    for top_k in range(1, 9):
        yield from moe(bf16, (64, 32, 64), 16, top_k, 21, residual="in-place", spread="ties", renormalise=top_k % 2 == 0)
    for experts, top_k in ((1, 1), (2, 2), (60, 4), (128, 8), (200, 6)):
        for tokens in (1, 30):
            yield from moe(bf16, (48, 24, 48), experts, top_k, tokens, residual="apart", renormalise=True)
    for spread in ("one", "few"):
        yield from moe(bf16, (64, 64, 64), 16, 1, 70, spread=spread, renormalise=True, scale=2.5)
    for tokens in (1, 25):
        yield from moe(bf16, (64, 32, 64), 1, 1, tokens, residual="apart", score="sigmoid")
        yield from moe(bf16, (64, 32, 64), 16, 4, tokens, score="sigmoid", groups=4, top_groups=2, scale=2.5)
        yield from moe(bf16, (64, 32, 64), 24, 4, tokens, groups=6, top_groups=3, spread="ties", scale=16.0)
        grouped = {"groups": 4, "top_groups": 2, "group_best": 2, "renormalise": True, "scale": 2.5}
        yield from moe(bf16, (64, 32, 64), 32, 8, tokens, score="sigmoid", correction=True, **grouped)
        yield from moe(bf16, (64, 32, 64), 9, 2, tokens, correction=True)
        clamped = {"alpha": 1.702, "limit": 1.5, "up_offset": 1.0}
        yield from moe(bf16, (64, 40, 64), 8, 4, tokens, bias=True, renormalise=True, **clamped)
    for kind in ("gelu", "gelu_tanh", "relu"):
        yield from moe(bf16, (64, 32, 64), 4, 2, 9, kind=kind)


def linears(dense_forms: list[Form], every_width: list[Form], every_group: list[Form]) -> Iterator[tuple[str, Builder]]:
    """Every form in a small and a larger product; the numbers of tokens, rows and columns go round."""
    tokens = itertools.cycle((1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 70))
    outs = itertools.cycle((16, 1, 67, 130, 48, 33, 15))
    for form in dense_forms:
        for out, width in ((1, 1), (3, 7), (67, 129), (16, 64), (130, 576), (33, 1000)):
            for count in (1, next(tokens), 40):
                yield from linear(form, out, width, count)
    whole = itertools.cycle((50, 33, 96, 7, 576))
    odd_groups = [
        Form("affine", 4, 8, True),
        Form("affine", 8, 40, False, 128),
        Form("affine", 5, 3, True),
        Form("affine", 8, 1, True),
    ]
    for form in [*every_width, *every_group, *odd_groups]:
        for groups in (1, 5, 9):
            yield from linear(form, next(outs), next(whole) if form.group == 0 else groups * form.group, next(tokens))
        yield from linear(form, next(outs), 240 if form.group % 16 else 256, 1)


def large_table() -> Iterator[tuple[str, Builder]]:
    """Sizes where a GPU changes from one kernel to another. The CPU has no such borders, and would take long."""
    bf16 = Form("bf16")
    for form, out, width in ((bf16, 1024, 4096), (bf16, 3072, 1024), (bf16, 2000, 1536), (Form("affine", 4, 32, True), 1024, 2048)):
        for tokens in (1, 4, 8, 13, 16, 27, 32, 50, 64, 65, 120, 130, 250):
            yield from linear(form, out, width, tokens)
    for tokens in (1, 8, 30, 64, 100, 250):
        yield from linear(bf16, 1024, 2048, tokens, bias=True, residual="in-place")
        yield from linear(bf16, 1024, 2048, tokens, residual="apart", views=True)
        yield from gated_linear(bf16, 1408, 1024, tokens, "silu")
        yield from gated_linear(bf16, 512, 1024, tokens, "gelu_tanh", bias=True)
        yield from gated_linear(bf16, 512, 1024, tokens, "relu2")
    q4 = Form("affine", 4, 128, zero=8)
    q8 = Form("affine", 8, 0, zero=128)
    for form in (q4, q8, Form("affine", 4, 128, points=True), Form("affine", 4, 64, True), Form("affine", 3, 32, points=True)):
        for tokens in (1, 13, 33, 100, 190, 300):
            yield from linear(form, 1000, 1536, tokens)
    for form in (q4, q8):
        for tokens in (1, 30, 64, 130, 400):
            yield from linear(form, 1024, 2048, tokens, bias=True, residual="in-place")
            yield from linear(form, 1024, 1152, tokens, residual="apart", views=True)
            yield from gated_linear(form, 1408, 1024, tokens, "silu")
            yield from gated_linear(form, 510, 1024, tokens, "gelu_tanh", bias=True)
    for tokens in (1, 2, 5, 16, 33, 64, 130, 300, 700):
        yield from moe(bf16, (512, 384, 512), 8, 2, tokens, renormalise=True, residual="apart")
        yield from moe(bf16, (256, 128, 256), 64, 6, tokens, bias=True)
    coded = [Form("affine", 4, 128, zero=8), Form("affine", 4, 32, True), Form("affine", 8, 0, zero=128)]
    for form in (*coded, Form("fp8"), Form("fp8", block=(128, 128))):
        for tokens in (1, 7, 40, 300):
            yield from moe(form, (512, 384, 512), 8, 2, tokens, bias=True, renormalise=True)
    yield from moe(bf16, (1024, 1000, 1032), 4, 1, 600, spread="one", residual="in-place")
    yield from moe(bf16, (512, 264, 512), 32, 4, 400, spread="few", bias=True, alpha=1.702, limit=1.5, up_offset=1.0)
    for head_dim in (64, 80, 96, 112, 128, 160, 192, 256):
        for heads, kv_heads in ((4, 4), (4, 2), (8, 1)):
            yield from attention(head_dim, heads, kv_heads, "many")
    for head_dim in (64, 128, 256):
        yield from attention(head_dim, 4, 2, "long")
        yield from attention(head_dim, 4, 2, "long", context=True)
    for heads, kv_heads in ((16, 1), (6, 2), (7, 1)):
        for spans in ("long", "many"):
            yield from attention(128, heads, kv_heads, spans)
    for window in (30, 300):
        yield from attention(128, 4, 1, "long", window=window)
    for page_tokens in (32, 256):
        yield from attention(128, 4, 1, "long", page_tokens=page_tokens)
    for spans in ("long", "many"):
        yield from prepare_qkv(128, 8, 2, spans, norms="qk", form=RopeForm(128))


CASES: dict[str, Builder] = dict(table())
LARGE_CASES: dict[str, Builder] = dict(large_table())


def build(name: str) -> Case:
    """The same case every time."""
    case = (CASES.get(name) or LARGE_CASES[name])(np.random.default_rng(zlib.crc32(name.encode())))
    case.program.validate()
    return case
