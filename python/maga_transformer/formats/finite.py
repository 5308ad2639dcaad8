"""Looks for NaN and infinities in weights: damage, or an overflow in training or conversion."""

from __future__ import annotations

import numpy as np

from maga_transformer.formats.canonical import Affine, Array, Canonical, Dense

_EXPONENTS = {"fp32": (np.uint32, 0x7F800000), "fp16": (np.uint16, 0x7C00), "bf16": (np.uint16, 0x7F80)}
_BYTES_AT_ONCE = 1 << 20  # what is masked stays in a core's cache


def not_finite(weight: Canonical) -> str:
    """Where the first NaN or infinity is, "row 3" or "the scales of row 3"; "": nowhere."""
    if isinstance(weight, Dense):
        bits, exponent = _EXPONENTS[weight.dtype]
        return _named("", _row_with(weight.values.view(bits), exponent))
    if not isinstance(weight, Affine):
        row = _row_with(weight.codes, 0x7F)  # e4m3 has NaN only
        if row >= 0:
            return _named("", row)
        return _named("the scales of ", _row_of_scale(weight.scale), weight.block[0])
    found = _named("the scales of ", _row_of_scale(weight.scale))
    return found or ("" if weight.offset is None else _named("the offsets of ", _row_of_scale(weight.offset)))


def _row_with(bits: Array, mask: int) -> int:
    """The first row with an element that has all bits of the mask; -1: none."""
    rows = bits.reshape(len(bits), -1)
    step = max(1, _BYTES_AT_ONCE // max(1, rows[:1].nbytes))
    mask_of_bits = rows.dtype.type(mask)
    for begin in range(0, len(rows), step):
        masked = rows[begin : begin + step] & mask_of_bits
        if masked.size and masked.max() == mask_of_bits:
            return begin + int(np.argmax((masked == mask_of_bits).any(axis=1)))
    return -1


def _row_of_scale(scale: Array) -> int:
    return _row_with(scale.astype(np.float32, copy=False).view(np.uint32), _EXPONENTS["fp32"][1])


def _named(of: str, row: int, high: int = 1) -> str:
    return f"{of}row {row * high}" if row >= 0 else ""
