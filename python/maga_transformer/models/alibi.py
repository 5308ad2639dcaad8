"""Slopes of ALiBi (https://arxiv.org/abs/2108.12409), which takes the place of rotary positions in some families."""

import math


def alibi_slopes(heads: int) -> list[float]:
    """The paper's: powers of one ratio; heads beyond a power of two take every second one of the next finer ratio."""
    whole = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * h / whole) for h in range(1, whole + 1)]
    return slopes + [2 ** (-4 * (2 * k - 1) / whole) for k in range(1, heads - whole + 1)]


def mpt_slopes(heads: int, bias_max: float) -> list[float]:
    """MPT's: of the next power of two, every second first."""
    whole = 1 << math.ceil(math.log2(heads))
    slopes = [2 ** (-i * bias_max / whole) for i in range(1, whole + 1)]
    return slopes if whole == heads else (slopes[1::2] + slopes[::2])[:heads]
