"""Tensors that are made from stored ones when they are read: joined shards, rows in another order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from maga_transformer.checkpoint.files import release

Array = npt.NDArray[Any]

_ITEM_BYTES = {
    **dict.fromkeys(("fp64", "int64", "uint64"), 8),
    **dict.fromkeys(("fp32", "int32", "uint32"), 4),
    **dict.fromkeys(("fp16", "bf16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "fp8_e4m3", "fp8_e5m2", "fp8_e8m0"), 1),
}


@dataclass(frozen=True)
class Derived:
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str
    read: Callable[[], Array]
    stored: tuple[Shard, ...]  # what it is made of


class DerivedCheckpoint:
    """A Checkpoint of Derived tensors under Hugging Face's names. What `read` makes lives as long as its caller wants it."""

    def __init__(self, path: str, config: dict[str, Any], tensors: Mapping[str, Derived]) -> None:
        self.path, self.config = path, config
        self._tensors = dict(tensors)

    def _derived(self, name: str) -> Derived:
        if name not in self._tensors:
            raise ValueError(f"{self.path}: no tensor {name}")
        return self._tensors[name]

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._derived(name).shape

    def dtype(self, name: str) -> str:
        return self._derived(name).dtype

    def nbytes(self, name: str) -> int:
        return self._derived(name).nbytes

    def file(self, name: str) -> str:
        return self._derived(name).file

    def tensor(self, name: str) -> Array:
        return self._derived(name).read()

    def release(self, name: str) -> None:
        for shard in self._derived(name).stored:
            shard.release()

    def close(self) -> None:
        self._tensors.clear()


@dataclass(frozen=True)
class Shard:
    """A stored tensor of one rank's file."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    read: Callable[[], Array]
    mapped: Callable[[], list[Array]] | None = None  # what it is read from, where `read` makes a copy

    def release(self) -> None:
        for values in [self.read()] if self.mapped is None else self.mapped():
            release(values)


def whole(values: Array) -> Array:
    return values


def joined(name: str, shards: list[Shard], axis: int | None, take: Callable[[Array], Array] = whole) -> Derived:
    """The shards of all ranks side by side along an axis; None: every rank holds the whole tensor. `take` picks and orders the
    rows of each shard."""
    first = shards[0]
    for shard in shards:
        alike = [size for i, size in enumerate(shard.shape) if i != axis] == [
            size for i, size in enumerate(first.shape) if i != axis
        ]
        if not alike or shard.dtype != first.dtype:
            raise ValueError(
                f"{shard.file}: {name} has shape {shard.shape} and type {shard.dtype}, "
                f"in {first.file} it has {first.shape} and {first.dtype}"
            )
    if axis is None:
        shards = shards[:1]
    rows = [take(np.broadcast_to(np.uint8(0), (shard.shape[0], 1))).shape[0] if shard.shape else 0 for shard in shards]
    shapes = [(count, *shard.shape[1:]) if shard.shape else () for count, shard in zip(rows, shards, strict=True)]
    shape = shapes[0] if axis is None else tuple(sum(s[i] for s in shapes) if i == axis else n for i, n in enumerate(shapes[0]))

    def read() -> Array:
        parts = [take(shard.read()) for shard in shards]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=axis or 0)

    return Derived(first.dtype, shape, math.prod(shape) * _ITEM_BYTES[first.dtype], first.file, read, tuple(shards))


def halves_from_pairs(values: Array, heads: int) -> Array:
    """Rows of each head from the order that rotates (2j, 2j + 1) to the one that rotates (j, j + d/2)."""
    order = pairs_to_halves(values.shape[0], heads)
    return values if order is None else values[order]


def pairs_to_halves(rows: int, heads: int) -> Array | None:
    """The order of rows for halves_from_pairs; None for a number of rows that the program builder refuses by name."""
    if heads < 1 or rows % (2 * heads):
        return None
    order: Array = np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)
    return order
