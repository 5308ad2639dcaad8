"""Cases of the ops that know positions: rope, log_scale, attention, prepare_qkv."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from maga_transformer._core import Program, View

from .case import PAGE_TOKENS, Builder, Case, OpProgram, PageTables, Run, rows
from .weights import from_bf16, to_bf16


@dataclass(frozen=True)
class RopeForm:
    rotary: int
    interleaved: bool = False
    multiplier: float = 1.0
    dynamic: float = 0.0
    max_positions: int = 0
    stepped: bool = False
    long: bool = False  # frequencies of their own beyond max_positions
    by_block: bool = False

    def table(self, program: Program) -> int:
        inv_freq = [10000.0 ** (-2 * i / self.rotary) for i in range(self.rotary // 2)]
        return program.rope_table(
            self.rotary,
            inv_freq,
            interleaved=self.interleaved,
            multiplier=self.multiplier,
            theta=10000.0 if self.dynamic or self.stepped else 0.0,
            dynamic_factor=self.dynamic,
            stepped=self.stepped,
            by_block=self.by_block,
            long_inv_freq=[f / (1 + i) for i, f in enumerate(inv_freq)] if self.long else [],
            max_positions=self.max_positions,
        )

    def __str__(self) -> str:
        parts = [f"rope{self.rotary}", "interleaved" * self.interleaved]
        parts.append("by-block" * self.by_block)
        kinds = {"dynamic": bool(self.dynamic), "stepped": self.stepped, "long": self.long}
        parts += [f"{kind}{self.max_positions}" for kind, used in kinds.items() if used]
        return "-".join(filter(None, [*parts, f"times{self.multiplier:g}" if self.multiplier != 1 else ""]))


# (new tokens, context) of each sequence.
SPANS = {
    "prefill": [(37, 0)],
    "decode": [(1, 100)],
    "ragged": [(1, 15), (5, 0), (1, 16), (20, 31), (1, 0), (3, 64)],
    "far": [(5, 700), (1, 900)],
    "decodes": [(1, 3), (1, 47), (1, 16), (1, 129), (1, 31)],
    "long": [(1, 400), (70, 130), (150, 0), (1, 900)],
    "many": [(1, 7 * s % 100) for s in range(40)],
}


def spans_of(name: str) -> tuple[list[int], list[list[tuple[int, int, int]]]]:
    """Lengths of the sequences, and the spans of one or two steps: contexts first, if any, then the new tokens."""
    spans = SPANS[name]
    contexts = [(s, 0, context) for s, (_, context) in enumerate(spans) if context]
    new = [(s, context, context + count) for s, (count, context) in enumerate(spans)]
    return [count + context for count, context in spans], [step for step in (contexts, new) if step]


def rope(
    form: RopeForm, head_dim: int, heads: int, spans: str, *, prompt: int = 0, shift: int = 0, offset: int = 0
) -> Iterator[tuple[str, Builder]]:
    """`shift`: of positions against K/V indices."""

    def build(rng: np.random.Generator) -> Case:
        p = OpProgram(rng)
        x = p.keep(p.input("x", heads * head_dim + 3))
        p.program.rope(View(x.value, 1, heads * head_dim), head_dim=head_dim, table=form.table(p.program), offset=offset)
        lengths, steps = spans_of(spans)
        tables = PageTables(rng, lengths)
        step = tables.step(steps[-1], prompt_length=[prompt] * len(lengths))
        step["positions"] = [position + shift for position in step["positions"]]
        if form.by_block:
            step["block_positions"] = rng.integers(0, 50, len(step["ids"])).tolist()
        return p.case([Run(step, {x.value: rows(rng, len(step["ids"]), x.width)})])

    extras = f"{f'-prompt{prompt}' if prompt else ''}{f'-shift{shift}' if shift else ''}{f'-offset{offset}' if offset else ''}"
    yield f"{form}-head{head_dim}-x{heads}-{spans}{extras}", build


def log_scale(width: int, spans: str, from_: int) -> Iterator[tuple[str, Builder]]:
    def build(rng: np.random.Generator) -> Case:
        p = OpProgram(rng)
        x = p.keep(p.input("x", width + 3))
        p.program.log_scale(View(x.value, 1, width), from_=from_)
        lengths, steps = spans_of(spans)
        step = PageTables(rng, lengths).step(steps[-1])
        return p.case([Run(step, {x.value: rows(rng, len(step["ids"]), x.width)})])

    yield f"log_scale-{width}-{spans}-from{from_}", build


def attention(
    head_dim: int,
    heads: int,
    kv_heads: int,
    spans: str,
    *,
    window: int = 0,
    v_dim: int = 0,
    kv_dtype: str = "fp32",
    page_tokens: int = PAGE_TOKENS,
    soft_cap: float = 0.0,
    alibi: bool = False,
    sinks: bool = False,
    tree: bool = False,
    context: bool = False,
    in_keys: bool = False,
    scales: tuple[float, float] | None = None,
) -> Iterator[tuple[str, Builder]]:
    """`scales`: of keys and values, as a checkpoint states them. `tree`: each new token sees itself and a random part of those
    before it. `context`: the first two thirds of each sequence see each other. `in_keys`: values are the first columns of the
    keys."""

    def build(rng: np.random.Generator) -> Case:
        p = OpProgram(rng)
        width_v = v_dim or head_dim
        layer = p.program.cache_layer(kv_heads, head_dim, width_v, values_in_keys=in_keys)
        if scales:
            p.program.state_scales(layer, *scales)
        widths = heads * head_dim, kv_heads * head_dim, 0 if in_keys else kv_heads * width_v
        qkv = p.input("qkv", sum(widths))
        offsets = itertools.accumulate(widths, initial=0)
        q, k, v = (View(qkv.value, offset, width) for offset, width in zip(offsets, widths, strict=False))
        p.program.attention(
            p.output("out", heads * width_v),
            q,
            k,
            None if in_keys else v,
            layer=layer,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=1.5 / math.sqrt(head_dim),
            window=window,
            soft_cap=soft_cap,
            alibi=p.program.alibi_slopes([2.0 ** (-8 * (h + 1) / heads) for h in range(heads)]) if alibi else -1,
            sinks=p.vector(heads) if sinks else -1,
        )
        lengths, steps = spans_of(spans)
        tables = PageTables(rng, lengths, page_tokens)
        runs = []
        for span in steps:
            step = tables.step(span)
            if context:
                step["context"] = [2 * end // 3 for _, _, end in span]
            if tree and span is steps[-1]:
                step["tree"] = [random_bits(rng, i) for _, begin, end in span for i in range(end - begin)]
            # Keys and values that fp16 and bf16 pages hold exactly, so that every kind of page has one tolerance.
            runs.append(Run(step, {qkv.value: from_bf16(to_bf16(rows(rng, len(step["ids"]), qkv.width)))}))
        return p.case(runs, page_tokens=page_tokens, kv_dtype=kv_dtype)

    extras = f"{f'-window{window}' if window else ''}{f'-v{v_dim}' if v_dim else ''}-{kv_dtype}-pages{page_tokens}"
    extras += f"-scales{scales[0]:g},{scales[1]:g}" if scales else ""
    extras += f"{f'-cap{soft_cap:g}' if soft_cap else ''}{'-alibi' * alibi}{'-sinks' * sinks}{'-tree' * tree}{'-context' * context}"
    extras += "-in-keys" * in_keys
    yield f"attention-{head_dim}-{heads}over{kv_heads}-{spans}{extras}", build


def random_bits(rng: np.random.Generator, token: int) -> int:
    """Of the tokens up to this one, which it sees: itself, and each other with even odds."""
    return 1 << token | sum(1 << i for i in range(token) if rng.random() < 0.5)


def prepare_qkv(
    head_dim: int,
    heads: int,
    kv_heads: int,
    spans: str,
    *,
    norms: str = "",
    form: RopeForm | None = None,
    offset: float = 0.0,
    kv_dtype: str = "fp32",
) -> Iterator[tuple[str, Builder]]:
    """Followed by the attention that reads the pages, as pages cannot be read from outside."""

    def build(rng: np.random.Generator) -> Case:
        p = OpProgram(rng)
        layer = p.program.cache_layer(kv_heads, head_dim, head_dim)
        qkv = p.input("qkv", (heads + 2 * kv_heads) * head_dim)
        q = p.keep(View(qkv.value, 0, heads * head_dim))
        k = View(qkv.value, heads * head_dim, kv_heads * head_dim)
        v = View(qkv.value, (heads + kv_heads) * head_dim, kv_heads * head_dim)
        sizes = {"layer": layer, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        p.program.prepare_qkv(
            q,
            k,
            v,
            q_norm=p.vector(head_dim, 1.0) if "q" in norms else -1,
            k_norm=p.vector(head_dim, 1.0) if "k" in norms else -1,
            eps=1e-6,
            weight_offset=offset,
            rope_table=form.table(p.program) if form else -1,
            **sizes,
        )
        p.program.attention(p.output("out", q.width), q, None, None, scale=head_dim**-0.5, **sizes)
        lengths, steps = spans_of(spans)
        tables = PageTables(rng, lengths)
        runs = []
        for span in steps:
            step = tables.step(span)
            runs.append(Run(step, {qkv.value: rows(rng, len(step["ids"]), qkv.width)}))
        return p.case(runs, kv_dtype=kv_dtype)

    parts = [f"norm-{norms}" if norms else "", str(form) if form else "", f"offset{offset:g}" if offset else ""]
    extras = "-".join(filter(None, [*parts, kv_dtype if kv_dtype != "fp32" else ""]))
    yield f"prepare_qkv-{head_dim}-{heads}over{kv_heads}-{spans}-{extras or 'write'}", build
