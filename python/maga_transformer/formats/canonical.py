"""Canonical weights: every format is read into one of these forms, exactly. Backends pack nothing else (cpp/program/weight.h)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_ROWS_AT_ONCE = 4096  # so that a vocabulary's head is not held in fp32


@dataclass(frozen=True)
class Dense:
    """Values as they are."""

    values: Array  # (rows, columns) or (n); bf16 as its bits in uint16
    dtype: str  # fp32, fp16 or bf16

    def dequantize(self) -> npt.NDArray[np.float32]:
        return widened(self.values, self.dtype)


@dataclass(frozen=True)
class Affine:
    """values[r, c] = scale[r, c // group] * (codes[r, c] - zero) + offset[r, c // group]"""

    codes: npt.NDArray[np.uint8]  # (rows, columns), each below 2**bits
    bits: int
    group: int  # columns that share a scale
    scale: npt.NDArray[np.float32]  # (rows, columns // group)
    offset: npt.NDArray[np.float32] | None  # the same shape
    zero: int

    def dequantize(self) -> npt.NDArray[np.float32]:
        rows, columns = self.codes.shape
        steps = self.codes.reshape(rows, columns // self.group, self.group).astype(np.float32) - np.float32(self.zero)
        values: npt.NDArray[np.float32] = self.scale[:, :, None] * steps
        if self.offset is not None:
            values += self.offset[:, :, None]
        return values.reshape(rows, columns)


@dataclass(frozen=True)
class Float8:
    """values[r, c] = scale[r // high, c // wide] * E4M3[codes[r, c]]"""

    codes: npt.NDArray[np.uint8]  # (rows, columns)
    block: tuple[int, int]  # (high, wide): rows and columns that share a scale; the last block of either may be part empty
    scale: npt.NDArray[np.float32]  # (blocks of rows, blocks of columns)

    def dequantize(self) -> npt.NDArray[np.float32]:
        values = E4M3[self.codes]
        values *= np.repeat(self.by_row().scale, self.block[1], 1)[:, : self.codes.shape[1]]
        return values

    def by_row(self) -> Float8:
        """The same with scales for each row."""
        scale = np.ascontiguousarray(np.repeat(self.scale, self.block[0], 0)[: len(self.codes)])
        return Float8(self.codes, (1, self.block[1]), scale)


def _e4m3() -> npt.NDArray[np.float32]:
    """Every code's value: 4 bits of exponent (bias 7), 3 of mantissa, no infinity."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    size[(code & 127) == 127] = np.nan
    return np.where(code >= 128, -size, size).astype(np.float32)


E4M3 = _e4m3()

Canonical = Dense | Affine | Float8


def concatenate(parts: list[Canonical]) -> Canonical:
    """Stacks weights along the rows. All must share one form and its parameters: the program builder groups them so."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Dense):
        if any(not isinstance(part, Dense) or part.dtype != first.dtype for part in parts):
            raise ValueError("weights of different formats cannot be stacked")
        return Dense(np.concatenate([part.values for part in parts if isinstance(part, Dense)]), first.dtype)
    if isinstance(first, Float8):
        return _concatenate_float8([part for part in parts if isinstance(part, Float8)], len(parts))
    affine = [part for part in parts if isinstance(part, Affine)]
    if len({(part.zero, part.offset is None) for part in affine}) > 1:
        affine = [_with_offset(part) for part in affine]
        first = affine[0]
    if len(affine) != len(parts) or any((part.bits, part.group) != (first.bits, first.group) for part in affine):
        raise ValueError("weights of different formats cannot be stacked")
    return Affine(
        codes=np.concatenate([part.codes for part in affine]),
        bits=first.bits,
        group=first.group,
        scale=np.concatenate([part.scale for part in affine]),
        offset=None if first.offset is None else np.concatenate([part.offset for part in affine if part.offset is not None]),
        zero=first.zero,
    )


def _with_offset(weight: Affine) -> Affine:
    """The same, its zero made an offset: exact for scales of few digits, as formats have them (an fp16's)."""
    offset = weight.scale * np.float32(-weight.zero)
    return replace(weight, offset=offset if weight.offset is None else weight.offset + offset, zero=0)


def _concatenate_float8(parts: list[Float8], count: int) -> Float8:
    """Parts whose blocks of rows make no grid together (one scale each for different numbers of rows, say) get scales by row."""
    high, wide = parts[0].block
    if len(parts) != count or any(part.block[1] != wide for part in parts):
        raise ValueError("weights of different formats cannot be stacked")
    if any(part.block[0] != high or len(part.codes) % high for part in parts):
        parts, high = [part.by_row() for part in parts], 1
    return Float8(np.concatenate([part.codes for part in parts]), (high, wide), np.concatenate([part.scale for part in parts]))


def scaled(weight: Canonical, factor: float) -> Canonical:
    """All values times `factor`, in the same form."""
    times = np.float32(factor)
    if isinstance(weight, Float8):
        return replace(weight, scale=weight.scale * times)
    if isinstance(weight, Affine):
        return replace(weight, scale=weight.scale * times, offset=None if weight.offset is None else weight.offset * times)
    return Dense(rounded(weight.dequantize() * times, weight.dtype), weight.dtype)


def unit_rows(weight: Canonical) -> Canonical:
    """Each row divided by its Euclidean norm, or by 1e-12 if that is more (torch's normalize); the form stays the same."""
    if isinstance(weight, Float8):
        return replace(weight.by_row(), scale=weight.by_row().scale / _row_norms(weight.dequantize()))
    if isinstance(weight, Affine):
        norms = _row_norms(weight.dequantize())
        return replace(weight, scale=weight.scale / norms, offset=None if weight.offset is None else weight.offset / norms)
    values = np.empty_like(weight.values)
    for begin in range(0, len(values), _ROWS_AT_ONCE):
        part = Dense(weight.values[begin : begin + _ROWS_AT_ONCE], weight.dtype).dequantize()
        values[begin : begin + _ROWS_AT_ONCE] = rounded(part / _row_norms(part), weight.dtype)
    return Dense(values, weight.dtype)


def _row_norms(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    norms: npt.NDArray[np.float32] = np.maximum(np.linalg.norm(values, axis=1, keepdims=True), np.float32(1e-12))
    return norms


def widened(values: Array, dtype: str) -> npt.NDArray[np.float32]:
    """Values of a dense type in fp32."""
    return (values.astype(np.uint32) << 16).view(np.float32) if dtype == "bf16" else values.astype(np.float32)


def rounded(values: npt.NDArray[np.float32], dtype: str) -> Array:
    """Finite values in a dense type, to the nearest, ties to even."""
    if dtype != "bf16":
        return values.astype(np.float16 if dtype == "fp16" else np.float32)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
