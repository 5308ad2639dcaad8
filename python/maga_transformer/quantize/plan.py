"""Which tensors of a checkpoint are quantised, and the model's program in stages: runs of ops between places where one value alone
is carried on, so that a stage can be computed without the weights of any other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from maga_transformer import _core
from maga_transformer.checkpoint import Checkpoint, Source
from maga_transformer.formats.ggml import FORMATS
from maga_transformer.formats.quantized import quantization_config
from maga_transformer.quantize.recipe import Recipe

Op = dict[str, Any]
View = tuple[int, int, int]  # value, first column, columns


@dataclass(frozen=True)
class Linear:
    """A tensor that is quantised as one, whatever parts of it the ops use."""

    tensor: str
    rows: int
    columns: int
    input: View

    @property
    def module(self) -> str:
        return self.tensor.removesuffix(".weight")


@dataclass(frozen=True)
class Stage:
    first: int  # ops [first, last)
    last: int
    input: int | None  # the value that the stage before leaves; None: token ids
    output: int | None  # the value that it leaves; None: nothing that a later stage needs
    linears: tuple[Linear, ...]
    tensors: tuple[str, ...]  # all that its weights are made of, and no stage before it


@dataclass(frozen=True)
class Plan:
    program: _core.Program
    stages: tuple[Stage, ...]
    rest: tuple[str, ...]  # tensors of no stage: of the head, and those that the model does not use

    @property
    def linears(self) -> list[Linear]:
        return [linear for stage in self.stages for linear in stage.linears]


def make_plan(checkpoint: Checkpoint, program: _core.Program, recipe: Recipe, *, allow_requantize: bool) -> Plan:
    """ValueError naming what cannot be quantised, and why."""
    _check_source(checkpoint, program, recipe)
    ops, weights = program.ops, program.weights
    linears = _linears(checkpoint, program)
    for linear, _ in linears:
        _check_linear(checkpoint, linear, recipe, allow_requantize=allow_requantize)
    stages: list[Stage] = []
    placed: set[str] = set()
    start, carried = 0, None
    for op, value in [*_core.cuts(program), (len(ops), None)]:
        found = [linear for linear, indices in linears if start <= indices[0] < op]
        if not found:
            continue
        used = [name for weight in _weights(ops[start:op]) for name in map(_tensor, weights[weight][1])]
        tensors = tuple(name for name in dict.fromkeys(used) if name not in placed)
        placed.update(tensors)
        stages.append(Stage(start, op, carried, value, tuple(found), tensors))
        start, carried = op, value
    rest = tuple(name for name in checkpoint.names() if name not in placed)
    return Plan(program, tuple(stages), rest)


def _check_source(checkpoint: Checkpoint, program: _core.Program, recipe: Recipe) -> None:
    where = checkpoint.path
    quantised = quantization_config(checkpoint)
    if quantised is not None:
        raise ValueError(
            f"{where}: it is quantised already (quant_method {quantised[0]}): give the checkpoint that it was made from"
        )
    if program.embeds:
        raise ValueError(f"{where}: it embeds or scores; only models that generate are quantised")
    if any(op["op"] == "moe" for op in program.ops):
        raise ValueError(f"{where}: it is a mixture of experts ({program.family}), whose experts cannot be quantised yet")
    if recipe.calibrated and program.context[0] != -1:
        raise ValueError(
            f"{where}: --method {recipe.method} reads plain texts, which {program.family} does not; int8 and fp8 do not"
        )


def _linears(checkpoint: Checkpoint, program: _core.Program) -> list[tuple[Linear, list[int]]]:
    """Every linear but the head, in the program's order, and the ops that use it."""
    tables = {op["table"] for op in program.ops if op["op"] == "embed"}
    found: dict[str, tuple[Linear, list[int]]] = {}
    for index, op in enumerate(program.ops):
        if op["op"] != "linear" or op["out"][0] == program.logits or op["weight"] in tables:
            continue
        for text in program.weights[op["weight"]][1]:
            source = Source.parse(text)
            name = source.tensor
            if source.layout or source.matrix is not None or len(checkpoint.shape(name)) != 2:
                raise ValueError(
                    f"{checkpoint.file(name)}: {name} is stored as (columns, rows), or several together: no format can quantise it"
                )
            if source.unit or source.factor != 1 or not name.endswith(".weight"):
                raise ValueError(f"{checkpoint.file(name)}: {name} is not used as it is stored: no format can quantise it")
            rows, columns = checkpoint.shape(name)
            linear, indices = found.setdefault(name, (Linear(name, rows, columns, op["in"]), []))
            if linear.input != op["in"]:
                raise ValueError(f"{checkpoint.file(name)}: {name} is used twice, with different inputs: it cannot be quantised")
            indices.append(index)
    if not found:
        raise ValueError(f"{checkpoint.path}: it has no linears to quantise")
    return list(found.values())


def _check_linear(checkpoint: Checkpoint, linear: Linear, recipe: Recipe, *, allow_requantize: bool) -> None:
    name, dtype = linear.tensor, checkpoint.dtype(linear.tensor)
    where = f"{checkpoint.file(name)}: {name}"
    if dtype in FORMATS and not allow_requantize:
        raise ValueError(f"{where} is quantised already ({dtype}): give the original model, or --allow-requantize")
    group = recipe.group(linear.columns)
    if recipe.calibrated and linear.columns % group:
        fitting = [size for size in (128, 64, 32) if linear.columns % size == 0]
        hint = f"; {', '.join(map(str, fitting))} would" if fitting else ""
        raise ValueError(f"{where} has {linear.columns} columns: --group-size {group} does not divide them{hint}")
    words = {"gptq": 32 // recipe.bits if 32 % recipe.bits == 0 else 32, "awq": 8, "int8": 4, "fp8": 1}[recipe.method]
    sizes = {"rows": linear.rows, "columns": linear.columns} if recipe.method == "gptq" else {"rows": linear.rows}
    for what, size in ({"columns": linear.columns} if recipe.method == "int8" else sizes).items():
        if size % words:
            raise ValueError(f"{where} has {size} {what}: {recipe.method} of {recipe.bits} bits stores multiples of {words}")


def _weights(ops: list[Op]) -> list[int]:
    """Weights that ops use, in order. Tables of rotations are no weights."""
    fields = ("weight", "bias", "q_norm", "k_norm", "sinks", "gate_up", "down", "gate_up_bias", "down_bias")
    found = [op[field] for op in ops for field in fields if field in op]
    found += [op["table"] for op in ops if op["op"] in ("embed", "add_positions")]
    return [weight for weight in found if weight >= 0]


def _tensor(source: str) -> str:
    return Source.parse(source).tensor
