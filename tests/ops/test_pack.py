"""What a backend refuses to pack: arrays that are not what their weight claims, by the weight's name, and never by crashing."""

from typing import Any

import numpy as np
import pytest
from maga_transformer import _core
from numpy.lib.stride_tricks import as_strided

BACKENDS = {"reference": _core.reference_backend, "cpu": lambda: _core.cpu_backend(threads=1)}
ROWS = np.arange(4 * 32, dtype=np.float32).reshape(4, 32)
MISALIGNED = np.frombuffer(bytes(4 * 32 * 4 + 1), np.uint8)[1:].view(np.float32).reshape(4, 32)

DENSE: dict[str, tuple[list[int], Any, str]] = {  # shape, values, dtype
    "no dimensions": ([], np.ones((), np.float32), "fp32"),
    "three dimensions": ([4, 4, 8], ROWS.reshape(4, 4, 8), "fp32"),
    "fewer rows": ([5, 32], ROWS, "fp32"),
    "more rows": ([3, 32], ROWS, "fp32"),
    "turned": ([32, 4], ROWS, "fp32"),
    "a matrix as a vector": ([128], ROWS, "fp32"),
    "a vector as a matrix": ([4, 32], ROWS.reshape(-1), "fp32"),
    "longer vector": ([33], ROWS[0], "fp32"),
    "sizes that wrap": ([2**62, 8], ROWS, "fp32"),
    "negative sizes": ([-4, -32], ROWS, "fp32"),
    "negative length": ([-1], ROWS[0], "fp32"),
    "rows apart": ([2, 32], ROWS[::2], "fp32"),
    "rows backwards": ([4, 32], ROWS[::-1], "fp32"),
    "columns first": ([4, 32], np.asfortranarray(ROWS), "fp32"),
    "one row often": ([4, 32], np.broadcast_to(ROWS[0], (4, 32)), "fp32"),
    "more than memory holds": ([2**40, 32], as_strided(ROWS, (2**40, 32), (0, 4)), "fp32"),
    "misaligned": ([4, 32], MISALIGNED, "fp32"),
    "other byte order": ([4, 32], ROWS.astype(">f4"), "fp32"),
    "integers": ([4, 32], ROWS.astype(np.int32), "fp32"),
    "doubles": ([4, 32], ROWS.astype(np.float64), "fp32"),
    "floats as bf16": ([4, 32], ROWS.astype(np.float16), "bf16"),
    "bits as fp16": ([4, 32], ROWS.astype(np.uint16), "fp16"),
    "text": ([4, 32], np.zeros((4, 32), "S4"), "fp32"),
    "objects": ([4, 32], np.full((4, 32), None), "fp32"),
}

CODES = (np.arange(4 * 64) % 16).astype(np.uint8).reshape(4, 64)
SCALE = np.ones((4, 2), np.float32)
AFFINE: dict[str, dict[str, Any]] = {  # what differs from a matrix of 4 bits in groups of 32
    "code above its bits": {"codes": CODES + 1},
    "no bits": {"bits": 0},
    "nine bits": {"bits": 9},
    "fewer than no bits": {"bits": -1},
    "more bits than an int": {"bits": 100},
    "no group": {"group": 0},
    "negative group": {"group": -32},
    "group that divides nothing": {"group": 48},
    "group beyond the columns": {"group": 128},
    "negative zero": {"zero": -1},
    "zero above a byte": {"zero": 256},
    "least zero": {"zero": -(2**31)},
    "a scale too few": {"scale": SCALE[:, :1].copy()},
    "a scale too many": {"scale": np.ones((4, 3), np.float32)},
    "scales in a vector": {"scale": SCALE.reshape(-1)},
    "scales turned": {"scale": SCALE.reshape(2, 4)},
    "scales apart": {"scale": np.ones((4, 4), np.float32)[:, ::2]},
    "fp16 scales": {"scale": SCALE.astype(np.float16)},
    "an offset too few": {"offset": SCALE[:, :1].copy()},
    "no offsets": {"offset": np.ones((0, 2), np.float32)},
    "offsets of integers": {"offset": SCALE.astype(np.int32)},
    "signed codes": {"codes": CODES.astype(np.int8)},
    "wide codes": {"codes": CODES.astype(np.uint16)},
    "codes of a vector": {"shape": [256], "codes": CODES.reshape(-1)},
    "other shape": {"shape": [8, 32]},
}
FLOAT8: dict[str, dict[str, Any]] = {  # what differs from a matrix of codes in blocks of 2 by 32
    "no rows in a block": {"block": (0, 32)},
    "no columns in a block": {"block": (2, 0)},
    "negative block": {"block": (-2, 32)},
    "a scale too few": {"scale": SCALE[:1].copy()},
    "scales turned": {"block": (1, 32), "scale": np.ones((2, 4), np.float32)},
    "scales in a vector": {"scale": np.ones(4, np.float32)},
    "fp16 scales": {"scale": np.ones((2, 2), np.float16)},
    "signed codes": {"codes": CODES.astype(np.int8)},
    "codes of a vector": {"shape": [256], "codes": CODES.reshape(-1)},
    "other shape": {"shape": [8, 32]},
}


def pack_float8(backend: _core.Backend, *, shape: list[int] | None = None, codes: Any = CODES, **changes: Any) -> _core.Weight:
    form = {"block": (2, 32), "scale": np.ones((2, 2), np.float32), **changes}
    return backend.pack_float8("some.weight", shape or list(codes.shape), codes, **form)


def pack_affine(backend: _core.Backend, *, shape: list[int] | None = None, codes: Any = CODES, **changes: Any) -> _core.Weight:
    form = {"bits": 4, "group": 32, "scale": SCALE, "offset": None, "zero": 8, **changes}
    return backend.pack_affine("some.weight", shape or list(codes.shape), codes, **form)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> _core.Backend:
    return BACKENDS[request.param]()


@pytest.mark.parametrize("case", DENSE)
def test_dense(case: str, backend: _core.Backend) -> None:
    shape, values, dtype = DENSE[case]
    with pytest.raises(ValueError, match=r"some\.weight"):
        backend.pack_dense("some.weight", shape, values, dtype)


@pytest.mark.parametrize("case", AFFINE)
def test_affine(case: str, backend: _core.Backend) -> None:
    with pytest.raises(ValueError, match=r"some\.weight"):
        pack_affine(backend, **AFFINE[case])


@pytest.mark.parametrize("case", FLOAT8)
def test_float8(case: str, backend: _core.Backend) -> None:
    with pytest.raises(ValueError, match=r"some\.weight"):
        pack_float8(backend, **FLOAT8[case])


@pytest.mark.parametrize("values", [None, 1.0, "text", [[1.0]], b"1234"], ids=repr)
def test_what_is_no_array(values: Any, backend: _core.Backend) -> None:
    with pytest.raises(TypeError, match="pack_dense"):
        backend.pack_dense("some.weight", [1, 1], values, "fp32")
    for part in ("codes", "scale"):
        with pytest.raises(TypeError, match="pack_affine"):
            pack_affine(backend, **{"shape": [4, 64], part: values})


def test_what_is_taken(backend: _core.Backend) -> None:
    """The arrays above, undamaged, so that it is the damage that is refused."""
    assert backend.pack_dense("some.weight", [4, 32], ROWS, "fp32").bytes >= 128
    assert backend.pack_dense("some.weight", [4, 32], ROWS.astype(np.float16), "fp16").bytes >= 128
    assert backend.pack_dense("some.weight", [4, 32], ROWS.astype(np.uint16), "bf16").bytes >= 128
    assert backend.pack_dense("some.weight", [32], ROWS[0], "fp32").bytes >= 32
    assert pack_affine(backend).bytes >= 128
    assert pack_affine(backend, offset=SCALE).bytes >= 128
    assert pack_float8(backend).bytes >= 256
    assert pack_float8(backend, block=(4, 64), scale=np.ones((1, 1), np.float32)).bytes >= 256
    assert pack_float8(backend, block=(3, 48), scale=np.ones((2, 2), np.float32)).bytes >= 256


def test_stacks(backend: _core.Backend) -> None:
    def stack(count: int) -> _core.WeightStack:
        stack = backend.stack("some.experts", [2, 4, 32])
        for _ in range(count):
            stack.add_dense(ROWS, "fp32")
        return stack

    assert stack(2).finish().bytes >= 2 * 4 * 32 * 4
    with pytest.raises(ValueError, match=r"some\.experts.* has 1 of 2 matrices"):
        stack(1).finish()
    with pytest.raises(ValueError, match=r"some\.experts.* takes 2 matrices"):
        stack(3)
    with pytest.raises(ValueError, match=r"some\.experts\[1\]"):
        stack(1).add_dense(ROWS[:3].copy(), "fp32")
    with pytest.raises(ValueError, match=r"some\.experts.* has 2 sizes; a stack has three"):
        backend.stack("some.experts", [4, 32])
