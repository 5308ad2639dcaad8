"""Weights that hold NaN or an infinity are found, in every form and type, and named with the row."""

import numpy as np
import pytest
from maga_transformer.formats import Affine, Dense, Float8
from maga_transformer.formats.finite import not_finite

RANDOM = np.random.default_rng(5)
BITS = {
    "fp32": (np.uint32, 0x7F800000, 0xFFC00001),
    "fp16": (np.uint16, 0x7C00, 0xFE01),
    "bf16": (np.uint16, 0x7F80, 0xFFC1),
}


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("shape", [(7,), (900, 2000), (3, 5)])
def test_values(dtype, shape):
    bits, infinity, nan = BITS[dtype]
    finite = RANDOM.integers(0, infinity, shape).astype(bits)  # every finite value there is, subnormal ones too
    stored = bits if dtype == "bf16" else {"fp32": np.float32, "fp16": np.float16}[dtype]
    assert not_finite(Dense(finite.view(stored), dtype)) == ""
    for bad in (infinity, nan):
        broken = finite.copy()
        row = shape[0] - 1
        broken[row:].reshape(-1)[-1] = bad
        assert not_finite(Dense(broken.view(stored), dtype)) == f"row {row}"


def test_codes_and_scales():
    codes = RANDOM.integers(0, 16, (6, 8)).astype(np.uint8)
    scale = RANDOM.normal(size=(6, 2)).astype(np.float32)
    offset = np.zeros_like(scale)
    assert not_finite(Affine(codes, 4, 4, scale, offset, 0)) == ""
    scale[4, 1] = np.inf
    assert not_finite(Affine(codes, 4, 4, scale, offset, 0)) == "the scales of row 4"
    scale[4, 1], offset[2, 0] = 1, np.nan
    assert not_finite(Affine(codes, 4, 4, scale, offset, 0)) == "the offsets of row 2"
    scale = np.ones((3, 2), np.float32)
    assert not_finite(Float8(codes, (2, 4), scale)) == ""
    scale[1, 1] = np.nan
    assert not_finite(Float8(codes, (2, 4), scale)) == "the scales of row 2"
    codes[5, 7] = 0xFF
    assert not_finite(Float8(codes, (2, 4), np.ones_like(scale))) == "row 5"
