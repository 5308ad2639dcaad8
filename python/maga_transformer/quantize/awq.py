"""AWQ (Lin et al., https://arxiv.org/abs/2306.00978): columns that large inputs meet are scaled up before they are rounded, and
what makes those inputs is scaled down by as much: a norm's weights, or the rows of the linear before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from maga_transformer import _core
from maga_transformer.checkpoint import Source
from maga_transformer.quantize.calibrate import Inputs
from maga_transformer.quantize.grid import Floats, fit
from maga_transformer.quantize.plan import Linear, Stage, View

_STEPS = 20  # exponents that are tried
_MOST_ROWS = 4096  # of a linear that take part in the search


@dataclass(frozen=True)
class Fold:
    """Where the inverse of a scale goes: entries [first, first + columns) of the tensors, or those rows of matrices. `offset`: a
    norm multiplies by its weight plus this."""

    input: View
    tensors: tuple[str, ...]
    first: int = 0
    offset: float = 0.0


def folds(program: _core.Program, stage: Stage) -> list[Fold]:
    """Of the inputs of a stage's linears those whose scale can be folded into what makes them."""
    ops = program.ops[stage.first : stage.last]
    rows = {linear.tensor: linear.rows for linear in stage.linears}
    found = []
    for view in dict.fromkeys(linear.input for linear in stage.linears):
        makers = [op for op in ops if _writes(op, view[0])]
        readers = [op for op in ops if _reads(op, view[0])]
        only_linears = all(op["op"] == "linear" and op["in"] == view and _sources(program, op) <= rows.keys() for op in readers)
        if len(makers) != 1 or not only_linears or view[0] == stage.output or makers[0]["out"] != view:
            continue
        fold = _fold(program, ops, makers[0], view, rows)
        if fold is not None:
            found.append(fold)
    return found


def _fold(
    program: _core.Program, ops: list[dict[str, Any]], maker: dict[str, Any], view: View, rows: dict[str, int]
) -> Fold | None:
    if maker["op"] == "norm" and maker["group"] == view[2]:
        weights = [weight for weight in (maker["weight"], maker["bias"]) if weight >= 0]
        names = [_plain(program, weight) for weight in weights]
        alone = all(sum(weight in (op.get("weight"), op.get("bias")) for op in program.ops) == 1 for weight in weights)
        if names and maker["weight"] >= 0 and alone and None not in names:
            return Fold(view, tuple(name for name in names if name), offset=maker["weight_offset"])
    if maker["op"] == "activation" and maker["up"] is not None:
        value, first, width = maker["up"]
        for op in ops:
            if op["op"] == "linear" and op["out"][0] == value and op["out"][1] <= first and first + width <= sum(op["out"][1:]):
                return _rows(program, op, view, first - op["out"][1], rows)
    return None


def _rows(program: _core.Program, op: dict[str, Any], view: View, row: int, rows: dict[str, int]) -> Fold | None:
    """Of a linear whose sources are whole tensors: the one that has all of the rows, with its bias."""
    biases = program.weights[op["bias"]][1] if op["bias"] >= 0 else []
    for index, name in enumerate(program.weights[op["weight"]][1]):
        if name not in rows:  # a part of a tensor
            return None
        if row < rows[name]:
            names = [name, *biases[index : index + 1]]
            whole = all(Source.parse(text).tensor == text for text in names)
            return Fold(view, tuple(names), first=row) if whole and row + view[2] <= rows[name] else None
        row -= rows[name]
    return None


def _plain(program: _core.Program, weight: int) -> str | None:
    sources = program.weights[weight][1]
    return sources[0] if len(sources) == 1 and Source.parse(sources[0]).tensor == sources[0] else None


def _sources(program: _core.Program, op: dict[str, Any]) -> set[str]:
    return {Source.parse(text).tensor for text in program.weights[op["weight"]][1]}


def _writes(op: dict[str, Any], value: int) -> bool:
    return any(op.get(field) is not None and op[field][0] == value for field in ("out", "x"))


def _reads(op: dict[str, Any], value: int) -> bool:
    fields = ("in", "residual", "x", "q", "k", "v", "gate", "up", "a", "b", "logits")
    return any(isinstance(op.get(field), tuple) and op[field][0] == value for field in fields)


def search_scale(weights: list[Floats], inputs: Inputs, bits: int, group: int) -> Floats:
    """(columns): what the columns of linears with common inputs are multiplied by, so that rounding them changes their outputs
    least: mean |x| to some power between 0 and 1, over mean |w| to the rest of it."""
    sampled = [weight[:: -(-len(weight) // _MOST_ROWS)] for weight in weights]
    magnitude = np.maximum(inputs.magnitude / max(1, inputs.tokens), 1e-8)
    share = np.mean(np.concatenate([_shares(weight, group) for weight in sampled]), axis=0)
    best, least = np.ones_like(magnitude), np.inf
    for step in range(_STEPS):
        ratio = step / _STEPS
        scale = np.maximum(magnitude**ratio / (share ** (1 - ratio) + 1e-4), 1e-4) if ratio else np.ones_like(magnitude)
        scale = (scale / np.sqrt(scale.max() * scale.min())).astype(np.float32)
        cost = sum(_cost(weight, scale, inputs.gram, bits, group) for weight in sampled)
        if cost < least:
            best, least = scale, cost
    return best


def _shares(weight: Floats, group: int) -> Floats:
    """|w| over the largest of its group."""
    size = np.abs(weight).reshape(len(weight), -1, group)
    return np.asarray((size / np.maximum(size.max(axis=2, keepdims=True), 1e-12)).reshape(weight.shape))


def _cost(weight: Floats, scale: Floats, gram: Floats, bits: int, group: int) -> float:
    scaled = weight * scale
    rounded = np.empty_like(scaled)
    for begin in range(0, weight.shape[1], group):
        part = scaled[:, begin : begin + group]
        rounded[:, begin : begin + group] = fit(part, bits, symmetric=False, gram=None).rounded(part)
    errors = weight - rounded / scale
    return float(np.einsum("rk,rk->", errors @ gram, errors))


def scaled_inputs(inputs: Inputs, scale: Floats) -> Inputs:
    """Once what makes them is divided by `scale`."""
    return Inputs(inputs.gram / scale / scale[:, None], inputs.magnitude / scale, inputs.tokens)


def apply(fold: Fold, scale: Floats, tensors: dict[str, Floats], linears: tuple[Linear, ...]) -> None:
    """Scales the columns of the linears that have the fold's input, and divides what makes it. Changes `tensors`."""
    for linear in linears:
        if linear.input == fold.input:
            tensors[linear.tensor] = tensors[linear.tensor] * scale
    for index, name in enumerate(fold.tensors):
        values = tensors[name].copy()
        offset = fold.offset if index == 0 else 0.0
        part = values[fold.first : fold.first + len(scale)]
        divisor = scale[:, None] if values.ndim == 2 else scale
        values[fold.first : fold.first + len(scale)] = (part + offset) / divisor - offset
        tensors[name] = values
