"""A small random transformer of plain ops, as a family would write it: what fusing and batching are tested on."""

from dataclasses import dataclass

import numpy as np
from maga_transformer._core import Program, View

from .attention_cases import RopeForm
from .case import OpProgram
from .weights import Form, WeightData, dense, matrix, stack

VOCAB = 61


@dataclass(frozen=True)
class Shape:
    name: str
    form: Form
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    mlp: int = 96
    bias: bool = False
    head_norms: bool = False
    rope: RopeForm | None = None
    window: int = 0
    activation: str = "silu"
    experts: int = 0  # of the last layer, each token takes two; 0: an MLP as in the others

    def __str__(self) -> str:
        return self.name


SHAPES = [
    Shape("llama", Form("fp32"), rope=RopeForm(32)),
    Shape("llama-4bit", Form("affine", 4, 32, True), rope=RopeForm(32), kv_heads=1),
    Shape("qwen2", Form("bf16"), bias=True, rope=RopeForm(32, interleaved=True), heads=6, kv_heads=3),
    Shape("qwen3-8bit", Form("affine", 8, 32, False, 128), head_norms=True, rope=RopeForm(16), window=9),
    Shape("norope", Form("fp16"), head_norms=True, activation="gelu_tanh", head_dim=40, hidden=96),
    Shape("experts", Form("bf16"), rope=RopeForm(32), experts=7),
    Shape("experts-4bit", Form("affine", 4, 32, True), rope=RopeForm(32), experts=16),
    Shape("dynamic", Form("fp32"), rope=RopeForm(32, dynamic=2.0, max_positions=24), activation="gelu"),
]


def transformer(shape: Shape, *, every_value: bool = False, seed: int = 0) -> tuple[Program, list[WeightData]]:
    """`every_value`: all values are outputs, so that nothing can be fused."""
    rng = np.random.default_rng(seed)
    p = OpProgram(rng)
    program = p.program
    q_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    rope = shape.rope.table(program) if shape.rope else None

    def value(name: str, width: int, rows: str = "tokens") -> View:
        return program.value(name, width, rows)

    def linear(x: View, name: str, width: int, bias: bool = False) -> View:
        out = value(name, width, "tokens")
        program.linear(out, x, weight=p.weight(matrix(rng, width, x.width, shape.form)), bias=p.vector(width) if bias else -1)
        return out

    def norm(x: View, out: View, group: int) -> View:
        program.norm(out, x, weight=p.weight(dense(rng, (group,), mean=1, deviation=0.2)), kind="rms", eps=1e-5, group=group)
        return out

    def add(a: View, b: View) -> View:
        out = value("sum", shape.hidden)
        program.add(out, a, b)
        return out

    def mixture(x: View, name: str) -> View:
        logits, out = value(f"{name}.logits", shape.experts), value(name, shape.hidden)
        program.linear(logits, x, weight=p.weight(dense(rng, (shape.experts, x.width), deviation=2 * x.width**-0.5)))
        weights = {
            "gate_up": p.weight(stack(rng, shape.experts, 2 * shape.mlp, x.width, shape.form)),
            "down": p.weight(stack(rng, shape.experts, shape.hidden, shape.mlp, shape.form)),
        }
        routing = {"experts": shape.experts, "top_k": 2, "renormalise": True}
        program.moe(out, x, logits, **weights, width=shape.mlp, **routing, kind=shape.activation)
        return out

    program.vocab, program.max_positions = VOCAB, 256
    x = value("embedding", shape.hidden)
    program.embed(x, p.weight(dense(rng, (VOCAB, shape.hidden))))
    for i in range(shape.layers):
        qkv = linear(norm(x, value(f"{i}.norm", shape.hidden), shape.hidden), f"{i}.qkv", q_width + 2 * kv_width, shape.bias)
        q = View(qkv.value, 0, q_width)
        k = View(qkv.value, q_width, kv_width)
        v = View(qkv.value, q_width + kv_width, kv_width)
        for part in (q, k):
            if shape.head_norms:
                norm(part, part, shape.head_dim)
        for part in (q, k):
            if rope is not None:
                program.rope(part, head_dim=shape.head_dim, table=rope)
        attended = value(f"{i}.attention", q_width)
        program.attention(
            attended,
            q,
            k,
            v,
            layer=program.cache_layer(shape.kv_heads, shape.head_dim, shape.head_dim),
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            scale=shape.head_dim**-0.5,
            window=shape.window,
        )
        x = add(x, linear(attended, f"{i}.o", shape.hidden))
        normed = norm(x, value(f"{i}.norm2", shape.hidden), shape.hidden)
        if shape.experts and i == shape.layers - 1:
            x = add(x, mixture(normed, f"{i}.experts"))
            continue
        both = linear(normed, f"{i}.gate_up", 2 * shape.mlp, shape.bias)
        hidden = value(f"{i}.hidden", shape.mlp)
        program.activation(hidden, View(both.value, 0, shape.mlp), View(both.value, shape.mlp, shape.mlp), kind=shape.activation)
        x = add(x, linear(hidden, f"{i}.down", shape.hidden))
    selected = value("selected", shape.hidden, "logits")
    program.select(selected, x)
    logits = value("logits", VOCAB, "logits")
    normed = norm(selected, value("final", shape.hidden, "logits"), shape.hidden)
    program.linear(logits, normed, weight=p.weight(matrix(rng, VOCAB, shape.hidden, shape.form)))
    program.logits = logits.value
    if every_value:
        for i in range(len(program.values)):
            program.output(View(i, 0, program.values[i][1]))
    program.validate()
    return program, p.weights
