"""Rounding to float8 e4m3."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from maga_transformer.formats.canonical import E4M3
from maga_transformer.quantize.grid import Floats

LARGEST = np.float32(448)
_VALUES = E4M3[:127]  # not negative, ascending
_MIDDLES = (_VALUES[:-1] + _VALUES[1:]) / 2


def to_e4m3(values: Floats) -> npt.NDArray[np.uint8]:
    """To the nearest, ties to the even code; what is beyond the largest becomes the largest."""
    size = np.abs(values)
    codes = np.searchsorted(_MIDDLES, size, side="left")
    tie = (codes < len(_MIDDLES)) & (_MIDDLES[np.minimum(codes, len(_MIDDLES) - 1)] == size)
    codes = codes + (tie & (codes % 2 == 1))
    return np.asarray(codes | np.where(np.signbit(values), 128, 0), np.uint8)
