"""`maga explain`: a model's program op by op, what each must move and compute in one decode step, and the least time for it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from maga_transformer import _core
from maga_transformer.checkpoint import Checkpoint, Source, open_checkpoint, stored_bytes
from maga_transformer.kv_cache import KV_DTYPES
from maga_transformer.measure import best_rate, memory_bandwidth
from maga_transformer.models import build_program


@dataclass(frozen=True)
class Row:
    op: str
    what: str
    shape: str
    weight_bytes: float
    kv_bytes: float
    flops: float


@dataclass(frozen=True)
class Rates:
    bandwidth_gb: float  # GB/s
    gflops: float

    def floor_ms(self, row: Row) -> float:
        """Whichever of moving and computing takes longer."""
        return max((row.weight_bytes + row.kv_bytes) / self.bandwidth_gb, row.flops / self.gflops) / 1e6


def explain(
    path: str,
    *,
    batch: int,
    context: int,
    model_type: str | None = None,
    kv_dtype: str = "fp16",
    bandwidth_gb: float | None,
    gflops: float | None,
    console: Console,
) -> None:
    """Prints one decode step of `batch` sequences that have `context` tokens each. Weights count as they are stored in the
    checkpoint. Rates that are None are measured on this machine."""
    for name, value, least in (("batch", batch, 1), ("context", context, 0)):
        if value < least:
            raise ValueError(f"{name} is {value}, expected at least {least}")
    kv_dtype = {"fp8": "fp8_e4m3"}.get(kv_dtype, kv_dtype)
    if kv_dtype not in KV_DTYPES:
        raise ValueError(f"kv_dtype is {kv_dtype!r}, expected one of {', '.join(KV_DTYPES)}")
    for setting, rate in (("bandwidth_gb", bandwidth_gb), ("gflops", gflops)):
        if rate is not None and not 0 < rate < float("inf"):
            raise ValueError(f"{setting} is {rate}, expected a finite number above 0")
    checkpoint = open_checkpoint(path)
    program, family = build_program(checkpoint, model_type)
    checkpoint = family.checkpoint
    rows = _rows(program, checkpoint, batch, context, kv_dtype)
    rates = Rates(bandwidth_gb or memory_bandwidth() / 1e9, gflops or _measured_gflops())

    parameters = sum(int(np.prod(shape)) for _, _, shape in program.weights)
    stored = sum(stored_bytes(checkpoint, sources) for _, sources, _ in program.weights)
    formats = stored_formats(program, checkpoint)
    console.print(f"[bold]{checkpoint.path}[/bold]")
    console.print(f"{family.model_type}, {parameters / 1e6:,.1f} M parameters in {_size(stored)} ({formats})")
    console.print(
        f"{len(program.cache_layers)} layers, vocabulary {program.vocab}, up to {program.max_positions} tokens, "
        f"{_size(program.page_bytes(1, kv_dtype))} of {kv_dtype} K/V a token"
    )
    console.print(_table(rows, rates))
    total = _total(rows)
    floor = sum(rates.floor_ms(row) for row in rows)
    memory = f"{rates.bandwidth_gb:.1f} GB/s" + (" (measured)" if bandwidth_gb is None else "")
    arithmetic = f"{rates.gflops:,.0f} GFLOP/s" + (" (measured: fp32 products)" if gflops is None else "")
    console.print(f"One step of {batch} sequences at {context} tokens of context, at {memory} and {arithmetic}:")
    console.print(
        f"{_size(total.weight_bytes)} of weights and {_size(total.kv_bytes)} of K/V moved, {total.flops / 1e6:,.3f} MFLOP: "
        f"[bold]at least {floor:.3f} ms, at most {batch / floor * 1e3:,.0f} tokens/s[/bold]"
    )


def _rows(program: _core.Program, checkpoint: Checkpoint, batch: int, context: int, kv_dtype: str) -> list[Row]:
    weights = program.weights
    sizes = [float(stored_bytes(checkpoint, sources)) for _, sources, _ in weights]
    costs = _core.cost(
        program,
        sequences=batch,
        tokens_per_sequence=1,
        context=context,
        logit_rows=batch,
        kv_dtype=kv_dtype,
        weight_bytes=sizes,
    )
    rows = []
    for op, (flops, weight_bytes, moved) in zip(program.ops, costs, strict=True):
        what, shape = _describe(op, weights, checkpoint)
        rows.append(Row(op["op"], what, shape, weight_bytes, moved, flops))
    return rows


def _describe(op: dict[str, Any], weights: list[tuple[str, list[str], list[int]]], checkpoint: Checkpoint) -> tuple[str, str]:
    """What the op works on, without the layer's number, and its sizes."""
    weight = op.get("weight", op.get("gate_up", op.get("table"))) if op["op"] != "rope" else None
    if weight is not None and weight >= 0:  # a norm may have none
        name, sources, shape = weights[weight]
        parts = [part for part in name.removesuffix(".weight").removeprefix("model.").split(".") if not part.isdigit()]
        dtype = checkpoint.dtype(Source.parse(sources[0]).tensor)
        chosen = f"{op['top_k']} of " if op["op"] == "moe" else ""
        return ".".join(parts).removeprefix("layers."), f"{chosen}{' x '.join(map(str, shape))} {dtype}"
    if op["op"] == "attention":
        window = f", window {op['window']}" if op["window"] else ""
        return "", f"{op['heads']} heads on {op['kv_heads']} of {op['head_dim']}{window}"
    view = op.get("x") or op["out"]
    return op.get("kind", ""), str(view[2])


def _table(rows: list[Row], rates: Rates) -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column("op")
    table.add_column("of")
    table.add_column("size")
    for heading in ("weights", "K/V", "MFLOP", "floor ms", "bound by"):
        table.add_column(heading, justify="right")
    for column in table.columns:
        column.no_wrap = True
    for count, block in _fold(rows):
        if count > 1:
            table.add_row(f"[bold]{count} times:[/bold]")
        for row in block:
            moves = (row.weight_bytes + row.kv_bytes) / rates.bandwidth_gb >= row.flops / rates.gflops
            table.add_row(
                ("  " if count > 1 else "") + row.op,
                row.what,
                row.shape,
                _size(row.weight_bytes),
                _size(row.kv_bytes),
                f"{row.flops / 1e6:,.3f}",
                f"{rates.floor_ms(row):.4f}",
                "memory" if moves else "arithmetic",
            )
        if count > 1:
            total = _total(block)
            table.add_row(
                f"[bold]{count} times, in all[/bold]",
                "",
                "",
                _size(count * total.weight_bytes),
                _size(count * total.kv_bytes),
                f"{count * total.flops / 1e6:,.3f}",
                f"{count * sum(rates.floor_ms(row) for row in block):.4f}",
            )
    return table


def _fold(rows: list[Row]) -> list[tuple[int, list[Row]]]:
    """Runs of equal blocks (layers) as (count, one block); what does not repeat as a block that occurs once."""
    folded: list[tuple[int, list[Row]]] = []
    at = 0
    while at < len(rows):
        best_count, best_period = 1, 1
        for period in range(2, (len(rows) - at) // 2 + 1):
            block, count = rows[at : at + period], 1
            while rows[at + count * period : at + (count + 1) * period] == block:
                count += 1
            if count > 1 and count * period > best_count * best_period:
                best_count, best_period = count, period
        folded.append((best_count, rows[at : at + best_period]))
        at += best_count * best_period
    return folded


def _total(rows: list[Row]) -> Row:
    total = [sum(column) for column in zip(*((row.weight_bytes, row.kv_bytes, row.flops) for row in rows), strict=True)]
    return Row("", "", "", *total)


def stored_formats(program: _core.Program, checkpoint: Checkpoint) -> str:
    """The formats of the weights, most bytes first."""
    stored: dict[str, int] = {}
    for _, sources, _ in program.weights:
        for source in map(Source.parse, sources):
            dtype = checkpoint.dtype(source.tensor)
            stored[dtype] = stored.get(dtype, 0) + source.nbytes(checkpoint)
    return ", ".join(
        f"{dtype} {size / sum(stored.values()):.0%}" for dtype, size in sorted(stored.items(), key=lambda item: -item[1])
    )


def _size(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B" if count else ""


def _measured_gflops() -> float:
    """A product of fp32 matrices, by the library that numpy was built with, on all cores."""
    size = 1024
    a = np.ones((size, size), np.float32)
    return best_rate(lambda: a @ a, 2 * size**3 / 1e9)
