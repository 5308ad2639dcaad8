"""Random lists of ops over few, overlapping columns: whatever fuse does to them, outputs stay what they were."""

from collections import Counter

import numpy as np
from maga_transformer._core import Program, View, fuse

from .case import Case, PageTables, Run, rows
from .harness import distance, load, reference, run
from .weights import WeightData, dense

ALL = {"linear_residual": True, "gated_linear": True, "prepare_qkv": True}
WIDTH, HEAD = 32, 8


class RandomProgram:
    """All values are inputs, so any op may read any column; ops prefer columns that were written lately."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.program = Program()
        self.program.vocab = 1
        self.values = [self.program.input(f"v{i}", WIDTH) for i in range(5)]
        self.program.rope_table(HEAD, [1.0, 0.5, 0.2, 0.1])
        self.program.rope_table(HEAD - 2, [1.0, 0.5, 0.2])
        self.weights: list[WeightData] = []
        self.last: list[View] = []
        self.layers = 0

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def view(self, width: int, *, recent: float = 0.7) -> View:
        fitting = [view for view in self.last[-3:] if view.width == width]
        if fitting and self.chance(recent):
            return fitting[-1]
        value = self.values[self.rng.integers(len(self.values))]
        return View(value.value, int(self.rng.integers((WIDTH - width) // 4 + 1)) * 4, width)

    def weight(self, *shape: int) -> int:
        deviation = shape[-1] ** -0.5 if len(shape) == 2 else 1.0
        self.weights.append(dense(self.rng, shape, deviation=deviation))
        return self.program.weight(f"weight{len(self.weights)}", ["-"], list(shape))

    def norm(self, out: View, x: View) -> None:
        eps, kind = (1e-3, "rms") if self.chance(0.8) else (1e-2, "layer")
        self.program.norm(out, x, weight=self.weight(HEAD), kind=kind, eps=eps, group=HEAD)

    def rope(self, x: View) -> None:
        self.program.rope(x, head_dim=HEAD, table=int(self.chance(0.15)))

    def mlp(self) -> None:
        out, x, y = self.view(16, recent=0.1), self.view(16), self.view(8, recent=0.1)
        self.program.linear(out, x, weight=self.weight(16, 16), bias=self.weight(16) if self.chance(0.3) else -1)
        self.noise()
        gate = View(out.value, out.offset, 8)
        up = View(out.value, out.offset + (8 if self.chance(0.8) else 4), 8)
        self.program.activation(y, gate, up, kind="silu")
        self.last.append(y)

    def residual(self) -> None:
        x, out = self.view(8), self.view(8, recent=0.1)
        self.program.linear(out, x, weight=self.weight(8, 8))
        self.noise()
        other = self.view(8, recent=0.2)
        pair = (out, other) if self.chance(0.5) else (other, out)
        to = other if self.chance(0.3) else self.view(8, recent=0.1)
        self.program.add(to, *pair)
        self.last.append(to)

    def attention(self) -> None:
        q, k, v = self.view(16, recent=0.4), self.view(8, recent=0.3), self.view(8, recent=0.3)
        for step in (self.norm, self.rope):
            for name in ("q", "k") if self.chance(0.5) else ("k", "q"):
                if self.chance(0.2):
                    continue
                x = q if name == "q" else k
                if step == self.norm:
                    out = x if self.chance(0.6) else self.view(x.width, recent=0.1)
                    self.norm(out, x)
                    q, k = (out, k) if name == "q" else (q, out)
                else:
                    self.rope(x)
            self.noise()
        out = self.view(16, recent=0.1)
        layer = self.program.cache_layer(1, HEAD, HEAD)
        self.program.attention(out, q, k, v, layer=layer, heads=2, kv_heads=1, head_dim=HEAD, scale=0.5)
        self.last.append(out)

    def noise(self) -> None:
        if self.chance(0.25):
            x, out = self.view(8), self.view(8, recent=0.3)
            self.program.activation(out, x, None, kind="gelu")
            self.last.append(out)

    def case(self) -> Case:
        for _ in range(4):
            [self.mlp, self.residual, self.attention][self.rng.integers(3)]()
        outputs = [value for value in self.values if self.chance(0.35)] or [View(self.last[-1].value, 0, WIDTH)]
        for value in outputs:
            self.program.output(value)
        tables = PageTables(self.rng, [5, 3])
        inputs = {value.value: rows(self.rng, 8, WIDTH) for value in self.values}
        return Case(self.program, self.weights, [Run(tables.step([(0, 0, 5), (1, 0, 3)]), inputs)], outputs)


def valid_cases(count: int) -> list[Case]:
    """The first `count` seeds whose program is valid: random views may overlap where an op forbids it."""
    cases, seed = [], 0
    while len(cases) < count:
        case = RandomProgram(seed).case()
        seed += 1
        try:
            case.program.validate()
        except ValueError:
            continue
        cases.append(case)
    return cases


def test_fuse_changes_no_output() -> None:
    fused_ops: Counter[str] = Counter()
    for i, case in enumerate(valid_cases(600)):
        fused = fuse(case.program, **ALL)
        fused.validate()
        fused_ops.update(op["op"] for op in fused.ops if op["op"] in ("gated_linear", "prepare_qkv") or op.get("residual"))
        want = run(load(reference(), case), case)
        got = run(load(reference(), case, fused), case)
        assert distance(got, want) < 1e-5, f"case {i}: {[op['op'] for op in case.program.ops]} became {fused.ops}"
    assert min(fused_ops[name] for name in ("gated_linear", "linear", "prepare_qkv")) > 50, fused_ops
