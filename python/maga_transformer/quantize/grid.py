"""Codes of a few bits with a scale and a zero a group of columns: how they are chosen, and what they stand for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

_SHRINKS = 1.0 - 0.05 * np.arange(10, dtype=np.float32)  # of a group's range: outliers may cost more than they are worth


@dataclass(frozen=True)
class Quantized:
    """values[n, k] = scale[n, g] * (codes[n, k] - zero[n, g]), with g = group_of[k]"""

    codes: npt.NDArray[np.uint8]  # (rows, columns)
    scale: Floats  # (rows, groups); an fp16 holds each
    zero: npt.NDArray[np.uint8]  # (rows, groups)
    group_of: npt.NDArray[np.int32]  # (columns)

    def dequantize(self) -> Floats:
        steps = self.codes.astype(np.float32) - self.zero[:, self.group_of]
        return np.asarray(steps * self.scale[:, self.group_of], np.float32)


@dataclass(frozen=True)
class Grid:
    """Of one group."""

    bits: int
    scale: Floats  # (rows)
    zero: Floats  # (rows), whole numbers

    def codes(self, values: Floats) -> Floats:
        """Of (rows) or (rows, columns)."""
        scale, zero = (self.scale, self.zero) if values.ndim == 1 else (self.scale[:, None], self.zero[:, None])
        return np.asarray(np.clip(np.rint(values / scale) + zero, 0, (1 << self.bits) - 1), np.float32)

    def rounded(self, values: Floats) -> Floats:
        scale, zero = (self.scale, self.zero) if values.ndim == 1 else (self.scale[:, None], self.zero[:, None])
        return np.asarray(scale * (self.codes(values) - zero), np.float32)


def fit(values: Floats, bits: int, *, symmetric: bool, gram: Floats | None) -> Grid:
    """The grid of a group of columns, (rows, columns). `gram`: what an error costs, as (columns, columns) of the inputs' products
    or their diagonal; the grid is then the best of a few narrower ones. None: the one that holds all values."""
    if gram is None:
        return _grid(values, bits, symmetric, np.float32(1))
    best = _grid(values, bits, symmetric, np.float32(1))
    least = _cost(values - best.rounded(values), gram)
    for shrink in _SHRINKS[1:]:
        grid = _grid(values, bits, symmetric, shrink)
        cost = _cost(values - grid.rounded(values), gram)
        better = cost < least
        least = np.where(better, cost, least)
        best = Grid(bits, np.where(better, grid.scale, best.scale), np.where(better, grid.zero, best.zero))
    return best


def _cost(errors: Floats, gram: Floats) -> Floats:
    """(rows)"""
    if gram.ndim == 1:
        return np.asarray(np.square(errors) @ gram)
    return np.asarray(np.einsum("rk,rk->r", errors @ gram, errors))


def _grid(values: Floats, bits: int, symmetric: bool, shrink: np.float32) -> Grid:
    steps = (1 << bits) - 1
    if symmetric:
        scale = 2 * np.abs(values).max(axis=1) * shrink / steps
        zero = np.full(len(values), 1 << (bits - 1), np.float32)
    else:
        low, high = np.minimum(values.min(axis=1), 0) * shrink, np.maximum(values.max(axis=1), 0) * shrink
        scale = (high - low) / steps
        zero = None
    scale = _halves(scale)
    if zero is None:
        zero = np.clip(np.rint(-low / scale), 0, steps).astype(np.float32)
    return Grid(bits, scale, zero)


def _halves(scale: Floats) -> Floats:
    """As an fp16 holds them, and no 0, so that values can be divided by them."""
    smallest = np.float32(6.2e-5)
    return np.asarray(np.maximum(scale, smallest).astype(np.float16).astype(np.float32))


def round_to_nearest(weight: Floats, bits: int, group: int, *, symmetric: bool, gram: Floats | None) -> Quantized:
    """Each group by itself. `gram`: (columns, columns), see `fit`."""
    columns = weight.shape[1]
    codes = np.empty(weight.shape, np.uint8)
    scales, zeros = [], []
    for begin in range(0, columns, group):
        part = weight[:, begin : begin + group]
        grid = fit(
            part, bits, symmetric=symmetric, gram=None if gram is None else gram[begin : begin + group, begin : begin + group]
        )
        codes[:, begin : begin + group] = grid.codes(part)
        scales.append(grid.scale)
        zeros.append(grid.zero.astype(np.uint8))
    return Quantized(codes, np.stack(scales, 1), np.stack(zeros, 1), np.arange(columns, dtype=np.int32) // group)
