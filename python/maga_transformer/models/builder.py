"""Writes a Program from a family's description: finds tensors, checks their shapes, and appends plain ops (the backend fuses)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from maga_transformer._core import Program, View
from maga_transformer.checkpoint import Checkpoint, DummyCheckpoint, Source
from maga_transformer.formats import read_weight
from maga_transformer.models.rope import Rope

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
# Buffers that some exporters store beside the weights, which follow from the config; and scales of keys and values (kv_cache.py).
_BUFFERS = re.compile(
    r"((rotary(_pos)?_emb|maybe_rotary)\.(inv_freq|cos_cached|sin_cached)|\b(attention|attn)\.(masked_)?bias|\.(k|v|kv)_scale)$"
)


@dataclass(frozen=True)
class Heads:
    heads: int
    kv_heads: int
    head_dim: int

    def widths(self) -> list[int]:
        """Columns of q, k and v."""
        return [count * self.head_dim for count in (self.heads, self.kv_heads, self.kv_heads)]


@dataclass(frozen=True)
class Routing:
    """How a router's logits choose experts, see Routing of cpp/program/ops.h. `correction`: a tensor with an entry an expert."""

    experts: int
    top_k: int
    score: str = "softmax"
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    renormalise: bool = False
    scale: float = 1.0
    correction: str | None = None


@dataclass(frozen=True)
class Experts:
    """The linears of all experts, as sources one expert after the other: of its gate rows and up rows, and of its down rows."""

    width: int
    gate_up: list[str]
    down: list[str]
    gate_up_bias: list[str] | None = None
    down_bias: list[str] | None = None


@dataclass(frozen=True)
class Norm:
    """y = (x / rms(x) * (weight + offset) + bias) * scale; `layer` subtracts the mean first."""

    kind: str  # rms or layer
    eps: float
    weight: bool = True
    bias: bool = False
    offset: float = 0.0
    scale: float = 1.0  # multiplied into the stored weight


class Builder:
    """Methods take and return Views; a tensor that is missing, surplus or of another shape is a ValueError that names it."""

    def __init__(self, checkpoint: Checkpoint, family: str, *, transposed_linears: bool = False) -> None:
        """`transposed_linears`: the checkpoint stores their weights as (in, out)."""
        self.program = Program()
        self.program.family = family
        self._checkpoint = checkpoint
        self._linear_layout = "transposed" if transposed_linears else ""
        self._names = set(checkpoint.names())
        self._used: set[str] = set()
        self._weights: dict[tuple[str, ...], int] = {}
        self._rope_tables: dict[int, int] = {}
        self._alibi_tables: dict[tuple[float, ...], int] = {}
        self._rows: dict[int, str] = {}  # of each value: tokens or logits
        self._layers = 0

    # --- ops ---

    def embed(self, table: str, *, vocab: int | None, hidden: int | None, scale: float = 1.0) -> View:
        """`vocab` and `hidden` may be None: the table's own size."""
        rows, columns = self._matrix(table, vocab, hidden)
        out = self._value("embedding", columns)
        self.program.embed(out, self._weight([table], [rows, columns]), scale=scale)
        self.program.vocab = rows
        return out

    def add_positions(self, x: View, table: str, *, positions: int, offset: int = 0, divisor: int = 1, repeats: int = 1) -> View:
        """x plus the row `position / divisor + offset` of a table of learned positions, which stands there `repeats` times."""
        rows, columns = self._matrix(table, positions + offset, x.width)
        out = self._value("positioned", columns)
        weight = self._weight([table] * repeats, [rows * repeats, columns])
        self.program.add_positions(out, x, table=weight, offset=offset, divisor=divisor)
        return out

    def norm(self, x: View, module: str, norm: Norm) -> View:
        out = self._value(module, x.width, self._rows[x.value])
        self._norm(out, x, module, norm, x.width)
        return out

    def norm_in_place(self, x: View, module: str, norm: Norm, group: int) -> None:
        """Of each run of `group` columns: each head of q or k, or all of them together."""
        self._norm(x, x, module, norm, group)

    def norm_heads(self, x: View, weights: str | Sequence[str], norm: Norm, head_dim: int) -> None:
        """In place, each head by a weight of its own: a tensor of (heads, head_dim), or one of (head_dim) a head."""
        if isinstance(weights, str):
            self._check(weights, (x.width // head_dim, head_dim))
            sources = [str(Source(weights, layout="flat"))]
        else:
            for tensor in weights:
                self._check(tensor, (head_dim,))
            sources = list(weights)
        weight = self._weight(sources, [x.width])
        self.program.norm(x, x, weight=weight, kind=norm.kind, eps=norm.eps, group=head_dim, weight_offset=norm.offset)

    def _norm(self, out: View, x: View, module: str, norm: Norm, group: int) -> None:
        weight = self._vector(module + ".weight", group, norm.scale) if norm.weight else -1
        bias = self._vector(module + ".bias", group, norm.scale) if norm.bias else -1
        self.program.norm(
            out, x, weight=weight, bias=bias, kind=norm.kind, eps=norm.eps, group=group, weight_offset=norm.offset * norm.scale
        )

    def linear(self, x: View, module: str, *, width: int | None = None, bias: bool = False) -> View:
        return self.linears(x, [module], widths=[width], bias=bias)[0]

    def linears(self, x: View, modules: Sequence[str], *, widths: Sequence[int | None], bias: bool = False) -> list[View]:
        """Several linears of one input as neighbouring columns of one value. Neighbours stored in the same format become one
        matrix; others stay apart, since a common format would cost bytes or exactness."""
        sizes = [self._linear_weight(m, width, x.width) for m, width in zip(modules, widths, strict=True)]
        if bias:
            for module, size in zip(modules, sizes, strict=True):
                self._check(module + ".bias", (size,))
        views = self._columns(_joined(modules), x, sizes)
        value = views[0].value
        parts = list(zip(modules, views, strict=True))
        for _, group in groupby(parts, key=lambda part: self._checkpoint.dtype(part[0] + ".weight")):
            names, outs = zip(*group, strict=True)
            out = View(value, outs[0].offset, sum(view.width for view in outs))
            sources = [str(Source(name + ".weight", layout=self._linear_layout)) for name in names]
            weight = self._weight(sources, [out.width, x.width])
            biases = self._weight([name + ".bias" for name in names], [out.width]) if bias else -1
            self.program.linear(out, x, weight=weight, bias=biases)
        return views

    def split_linear(self, x: View, module: str, widths: Sequence[int], *, groups: int = 1, bias: bool = False) -> list[View]:
        """Several linears of one input that the checkpoint stores as one tensor, as neighbouring columns of one value. Its rows
        are `groups` times a run of rows of each linear: 1 is one linear after the other, the number of heads is head by head."""
        total = sum(widths)
        self._linear_weight(module, total, x.width)
        if bias:
            self._check(module + ".bias", (total,))
        views = self._columns(module, x, widths)
        weight = self._weight(_runs(Source(module + ".weight", layout=self._linear_layout), widths, groups), [total, x.width])
        biases = self._weight(_runs(Source(module + ".bias"), widths, groups), [total]) if bias else -1
        self.program.linear(View(views[0].value, 0, total), x, weight=weight, bias=biases)
        return views

    def qkv(self, x: View, module: str, heads: Heads, *, bias: bool = False) -> list[View]:
        """(tokens, heads * head_dim), and keys and values (tokens, kv_heads * head_dim)."""
        return self.linears(x, [f"{module}.{name}_proj" for name in "qkv"], widths=heads.widths(), bias=bias)

    def rope(self, views: Sequence[View], rope: Rope, head_dim: int, *, offset: int = 0) -> None:
        """Rotates in place, from column `offset` of each head on."""
        if id(rope) not in self._rope_tables:
            self._rope_tables[id(rope)] = self.program.rope_table(
                rope.rotary_dim,
                rope.inv_freq,
                interleaved=rope.interleaved,
                multiplier=rope.multiplier,
                theta=rope.theta,
                by_block=rope.by_block,
                dynamic_factor=rope.dynamic_factor,
                stepped=rope.stepped,
                long_inv_freq=rope.long_inv_freq,
                max_positions=rope.max_positions,
            )
        for view in views:
            self.program.rope(view, head_dim=head_dim, table=self._rope_tables[id(rope)], offset=offset)

    def head_linear(self, x: View, name: str, sources: list[str], heads: int, rows: int, columns: int) -> View:
        """Of each head's run of x, its first `columns` times a matrix of its own (rows, columns), and the rest as it is."""
        out = self._value(name, x.width + heads * (rows - columns), self._rows[x.value])
        self.program.head_linear(out, x, weight=self._weight(sources, [heads, rows, columns], name), heads=heads)
        return out

    def attention(
        self,
        q: View,
        k: View,
        v: View | None,
        heads: Heads,
        *,
        v_dim: int = 0,
        window: int = 0,
        scale: float | None = None,
        soft_cap: float = 0.0,
        alibi: Sequence[float] | None = None,
        sinks: str | None = None,
    ) -> View:
        """Causal attention over pages of its own; `window` counts the keys that a query sees, 0 is all of them. `scale` None is
        head_dim**-0.5; scores stay below `soft_cap`, 0 is none; `alibi` are slopes, one a head, of what a score loses per token of
        distance; `sinks` a tensor with a score a head that takes part in the softmax and has no value. Without `v`, values are the
        first `v_dim` columns of the keys."""
        width = v_dim or heads.head_dim
        out = self._value(f"attention.{self._layers}", heads.heads * width)
        self.program.attention(
            out,
            q,
            k,
            v,
            layer=self.program.cache_layer(heads.kv_heads, heads.head_dim, width, values_in_keys=v is None),
            heads=heads.heads,
            kv_heads=heads.kv_heads,
            head_dim=heads.head_dim,
            scale=heads.head_dim**-0.5 if scale is None else scale,
            window=window,
            soft_cap=soft_cap,
            alibi=-1 if alibi is None else self._alibi_table(tuple(alibi)),
            sinks=-1 if sinks is None else self._vector(sinks, heads.heads),
        )
        self._layers += 1
        return out

    def gated_mlp(self, x: View, module: str, activation: str, *, width: int | None = None, bias: bool = False) -> View:
        """down(act(gate(x)) * up(x)), back to the width of x. `width` None: the gate's own size."""
        if width is None:
            width = self._matrix(f"{module}.gate_proj.weight", None, x.width)[0]
        gate, up = self.linears(x, [f"{module}.gate_proj", f"{module}.up_proj"], widths=[width, width], bias=bias)
        return self.linear(self.activate(gate, up, activation), f"{module}.down_proj", width=x.width, bias=bias)

    def mlp(self, x: View, up: str, down: str, activation: str, *, width: int | None = None, bias: bool = False) -> View:
        """down(act(up(x))), without a gate."""
        hidden = self.activate(self.linear(x, up, width=width, bias=bias), None, activation)
        return self.linear(hidden, down, width=x.width, bias=bias)

    def moe(
        self,
        x: View,
        logits: View,
        module: str,
        experts: Experts,
        routing: Routing,
        activation: str,
        *,
        alpha: float = 1.0,
        limit: float = 0.0,
        up_offset: float = 0.0,
    ) -> View:
        """The weighted sum of down(act(gate(x)) * up(x)) over the experts that the logits choose. `alpha`, `limit`, `up_offset`:
        see Gating of cpp/program/ops.h."""
        count, width = routing.experts, experts.width
        out = self._value("experts", x.width, self._rows[x.value])
        bias, down_bias = experts.gate_up_bias, experts.down_bias
        self.program.moe(
            out,
            x,
            logits,
            gate_up=self._weight(experts.gate_up, [count, 2 * width, x.width], f"{module}.(gate|up)"),
            down=self._weight(experts.down, [count, x.width, width], f"{module}.down"),
            gate_up_bias=-1 if bias is None else self._weight(bias, [count * 2 * width], f"{module}.(gate|up).bias"),
            down_bias=-1 if down_bias is None else self._weight(down_bias, [count * x.width], f"{module}.down.bias"),
            width=width,
            experts=count,
            top_k=routing.top_k,
            score=routing.score,
            correction=-1 if routing.correction is None else self._corrections(routing.correction, count),
            groups=routing.groups,
            top_groups=routing.top_groups,
            group_best=routing.group_best,
            renormalise=routing.renormalise,
            scale=routing.scale,
            kind=self._activation(activation),
            alpha=alpha,
            limit=limit,
            up_offset=up_offset,
        )
        return out

    def experts(
        self, module: str, count: int, width: int, hidden: int, names: Sequence[str] = ("gate_proj", "up_proj", "down_proj")
    ) -> Experts:
        """Stored one by one as `module`.3.gate_proj, or all together as `module`.gate_up_proj and `module`.down_proj, the matrices
        of one expert after the other's."""
        joined, down = f"{module}.gate_up_proj", f"{module}.{names[2]}"
        if self.has(joined):
            self._check(joined, (count, 2 * width, hidden))
            self._check(down, (count, hidden, width))
            gate_up, downs = ([str(Source(tensor, matrix=e)) for e in range(count)] for tensor in (joined, down))
            return Experts(width, gate_up, downs)
        return self.alone([f"{module}.{e}" for e in range(count)], width, hidden, names)

    def alone(
        self, modules: Sequence[str], width: int, hidden: int, names: Sequence[str] = ("gate_proj", "up_proj", "down_proj")
    ) -> Experts:
        """Experts that are modules of their own."""
        gate, up, down = names
        for module in modules:
            for name in (gate, up):
                self._check(f"{module}.{name}.weight", (width, hidden))
            self._check(f"{module}.{down}.weight", (hidden, width))
        gate_up = [f"{module}.{name}.weight" for module in modules for name in (gate, up)]
        return Experts(width, gate_up, [f"{module}.{down}.weight" for module in modules])

    def stacked(self, tensor: str, shape: tuple[int, ...], *, transposed: bool = False, interleaved: bool = False) -> list[str]:
        """Sources of the matrices of a tensor of three sizes, or the rows of one of two. `transposed`: stored as (columns, rows).
        `interleaved`: rows 0, 2, ..., and then 1, 3, ..."""
        self._check(tensor, shape)
        runs = ((0, 1, 2), (1, 2, 2)) if interleaved else ((0, 0, 0),)
        layout = "transposed" if transposed else ""
        return [str(Source(tensor, *run, layout=layout, matrix=e)) for e in range(shape[0]) for run in runs]

    def activate(self, gate: View, up: View | None, activation: str) -> View:
        """act(gate) * up, or act(gate)."""
        out = self._value("hidden", gate.width)
        self.program.activation(out, gate, up, kind=self._activation(activation))
        return out

    def clamp(self, views: Sequence[View], limit: float) -> None:
        """In place: no element further from 0 than `limit`. The views are neighbouring columns of one value."""
        all_of_them = View(views[0].value, views[0].offset, sum(view.width for view in views))
        self.program.bound(all_of_them, all_of_them, kind="clamp", limit=limit)

    def tanh(self, x: View) -> View:
        out = self._value("tanh", x.width, self._rows[x.value])
        self.program.bound(out, x, kind="tanh", limit=1.0)
        return out

    def _activation(self, name: str) -> str:
        if name not in _ACTIVATIONS:
            raise ValueError(
                f"{self._checkpoint.path}: activation {name!r} is not supported (supported: {', '.join(_ACTIVATIONS)})"
            )
        return _ACTIVATIONS[name]

    def add(self, a: View, b: View) -> View:
        out = self._value("residual", a.width, self._rows[a.value])
        self.program.add(out, a, b)
        return out

    def select(self, x: View) -> View:
        """The rows that need logits."""
        out = self._value("selected", x.width, "logits")
        self.program.select(out, x)
        return out

    def pool(self, x: View, kind: str) -> View:
        """One row a prompt: its first token's, its last one's, or the mean of all."""
        out = self._value("pooled", x.width, "logits")
        self.program.pool(out, x, kind=kind)
        return out

    def end_per_token(self, x: View, modules: Sequence[str]) -> None:
        """Ends a program that embeds with a row for every token: x, and behind it linears of it."""
        widths = [self._linear_weight(module, None, x.width) for module in modules]
        out = self._value("vectors", x.width + sum(widths), "logits")
        self.program.pool(View(out.value, 0, x.width), x, kind="last")
        chosen, at = self.select(x), x.width
        for module, width in zip(modules, widths, strict=True):
            weight, bias = self._weight([f"{module}.weight"], [width, x.width]), self._vector(f"{module}.bias", width)
            self.program.linear(View(out.value, at, width), chosen, weight=weight, bias=bias)
            at += width
        self.program.logits = out.value
        self.program.embeds = self.program.row_per_token = True

    def end(self, x: View, module: str | None = None, *, width: int | None = None, bias: bool = True) -> None:
        """Ends a program that embeds: with x, or with a linear of it."""
        if module is not None:
            x = self.linear(x, module, width=width, bias=bias)
        self.program.logits = x.value
        self.program.embeds = True

    def head(
        self,
        x: View,
        table: str,
        *,
        vocab: int | None,
        bias: str | None = None,
        unit_rows: bool = False,
        soft_cap: float = 0.0,
    ) -> None:
        """Logits from the selected rows; ends the program. `unit_rows`: each row of the table is divided by its norm. `soft_cap`:
        logits become soft_cap * tanh(logits / soft_cap); 0: they stay."""
        rows, columns = self._matrix(table, vocab, x.width)
        logits = self._value("logits", rows, "logits")
        weight = self._weight([str(Source(table, unit=unit_rows))], [rows, columns])
        self.program.linear(logits, x, weight=weight, bias=-1 if bias is None else self._vector(bias, rows))
        if soft_cap:
            self.program.bound(logits, logits, kind="tanh", limit=soft_cap)
        self.program.logits = logits.value
        self.program.vocab = rows

    # --- tensors ---

    def has(self, name: str) -> bool:
        return name in self._names

    def ignore(self, name: str) -> None:
        """Counts a tensor as used, so that `finish` does not report it."""
        self._used.add(name)

    def ignore_rest(self, pattern: str) -> None:
        """Counts the tensors whose names match as used: parts of the model that this task does without."""
        self._used.update(name for name in self._names if re.match(pattern, name))

    def finish(self) -> Program:
        """Refuses tensors that no op uses: they mean that the model is another one than the config says."""
        surplus = sorted(name for name in self._names - self._used if not _BUFFERS.search(name))
        if surplus:
            more = f" and {len(surplus) - 5} more" if len(surplus) > 5 else ""
            raise ValueError(
                f"{self._checkpoint.file(surplus[0])}: the model has no place for these tensors: {', '.join(surplus[:5])}{more}"
            )
        try:
            self.program.validate()
        except ValueError as error:
            raise ValueError(f"{self._checkpoint.path}: {error}") from None
        return self.program

    def _value(self, name: str, width: int, rows: str = "tokens") -> View:
        view = self.program.value(name, width, rows)
        self._rows[view.value] = rows
        return view

    def _columns(self, name: str, x: View, widths: Sequence[int]) -> list[View]:
        """Views of one new value, side by side."""
        value = self._value(name, sum(widths), self._rows[x.value])
        return [View(value.value, sum(widths[:i]), width) for i, width in enumerate(widths)]

    def _alibi_table(self, slopes: tuple[float, ...]) -> int:
        if slopes not in self._alibi_tables:
            self._alibi_tables[slopes] = self.program.alibi_slopes(list(slopes))
        return self._alibi_tables[slopes]

    def _check(self, name: str, expected: tuple[int | None, ...]) -> tuple[int, ...]:
        """The tensor's shape, which must agree with `expected` where that is not None."""
        if isinstance(self._checkpoint, DummyCheckpoint):  # it has what the model needs
            self._checkpoint.add(name, expected)
            self._names.add(name)
        wanted = "(" + ", ".join("any" if size is None else str(size) for size in expected) + ")"
        if name not in self._names:
            raise ValueError(f"{self._checkpoint.path}: tensor {name} is missing (expected shape {wanted})")
        shape = self._checkpoint.shape(name)
        if len(shape) != len(expected) or any(e is not None and e != s for e, s in zip(expected, shape, strict=True)):
            raise ValueError(f"{self._checkpoint.file(name)}: tensor {name} has shape {shape}, expected {wanted}")
        self._used.add(name)
        return shape

    def matrix(self, name: str, rows: int, columns: int) -> str:
        """Checks a tensor that sources are made of."""
        self._matrix(name, rows, columns)
        return name

    def vector(self, name: str, size: int) -> str:
        """As `matrix`."""
        self._check(name, (size,))
        return name

    def _matrix(self, name: str, rows: int | None, columns: int | None) -> tuple[int, int]:
        found = self._check(name, (rows, columns))
        return found[0], found[1]

    def _linear_weight(self, module: str, width: int | None, columns: int) -> int:
        """Checks a linear's weight; returns its width."""
        if self._linear_layout:
            return self._matrix(module + ".weight", columns, width)[1]
        return self._matrix(module + ".weight", width, columns)[0]

    def _vector(self, name: str, size: int, factor: float = 1.0) -> int:
        self._check(name, (size,))
        return self._weight([str(Source(name, factor=factor))], [size])

    def _corrections(self, tensor: str, count: int) -> int:
        self._check(tensor, (count,))
        return self.program.corrections(read_weight(self._checkpoint, [tensor]).dequantize().tolist())

    def _weight(self, sources: list[str], shape: list[int], name: str | None = None) -> int:
        """One weight per set of sources, so that tied tensors are stored once. `name` None: that of the tensors."""
        key = tuple(sources)
        if key not in self._weights:
            tensors = list(dict.fromkeys(Source.parse(source).tensor for source in sources))
            self._weights[key] = self.program.weight(name or _joined(tensors), sources, shape)
        return self._weights[key]


def _runs(whole: Source, widths: Sequence[int], groups: int) -> list[str]:
    """Sources of the rows of each linear, in turn."""
    if groups == 1:
        return [str(whole)]
    runs = [width // groups for width in widths]
    total = sum(runs)
    return [str(replace(whole, begin=sum(runs[:i]), end=sum(runs[: i + 1]), period=total)) for i in range(len(runs))]


def _joined(names: Sequence[str]) -> str:
    """a.q.weight, a.k.weight -> a.(q|k).weight"""
    if len(names) == 1:
        return names[0]
    split = [name.split(".") for name in names]
    prefix = 0
    while len({tuple(parts[: prefix + 1]) for parts in split}) == 1:
        prefix += 1
    middle = "|".join(parts[prefix] for parts in split)
    return ".".join([*split[0][:prefix], f"({middle})", *split[0][prefix + 1 :]])
