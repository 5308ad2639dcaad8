"""8-bit keys and values: what is left of a number, against torch's own fp8 types and plain rounding. With a window of one key each
token gets its own value back."""

import numpy as np
import pytest
import torch
from maga_transformer import _core

from .case import OpProgram as Ops
from .case import PageTables, Run, rows
from .harness import USABLE_ISAS, Mode, load, reference, run
from .weights import from_bf16

LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
TORCH = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def rounded_up_to_bf16(x: np.ndarray) -> np.ndarray:
    return from_bf16(((x.astype(np.float32).view(np.uint32).astype(np.uint64) + 0xFFFF) >> 16).astype(np.uint16))


def left_of(values: np.ndarray, kv_dtype: str, given: float = 0.0) -> np.ndarray:
    """(rows, head_dim), a head a row."""
    most, largest = np.abs(values).max(1), np.float32(LARGEST[kv_dtype])
    scale = rounded_up_to_bf16(most / largest) if not given else np.full(len(values), given, np.float32)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    y = np.clip(values * inverse[:, None], -largest, largest)
    codes = np.rint(y) if kv_dtype == "int8" else torch.from_numpy(y).to(TORCH[kv_dtype]).to(torch.float32).numpy()
    return codes * scale[:, None]


def values_of_every_size(width: int) -> np.ndarray:
    """Heads of sizes from 1e-20 to 1e20, and within some of them elements that differ as much as codes can; one is all zeros."""
    rng = np.random.default_rng(0)
    values = rows(rng, 82, width) * 10.0 ** np.linspace(-20, 20, 82)[:, None]
    values[1::2] *= 2.0 ** rng.uniform(-20, 0, (41, width))
    values[40] = 0
    return values.astype(np.float32)


@pytest.mark.parametrize("backend", ["reference", *USABLE_ISAS])
@pytest.mark.parametrize("width", [64, 37])
@pytest.mark.parametrize("kv_dtype", LARGEST)
def test_a_value_comes_back_as_its_code(kv_dtype: str, width: int, backend: str) -> None:
    device = reference() if backend == "reference" else Mode(backend, False).backend()
    values = values_of_every_size(width)
    for given in (0.0, 0.25) if kv_dtype == "fp8_e4m3" else (0.0,):
        p = Ops(np.random.default_rng(0))
        layer = p.program.cache_layer(1, width, width)
        p.program.state_scales(layer, given, given)
        qkv = p.input("qkv", 3 * width)
        q, k, v = (_core.View(qkv.value, i * width, width) for i in range(3))
        sizes = {"layer": layer, "heads": 1, "kv_heads": 1, "head_dim": width, "scale": 0.0, "window": 1}
        p.program.attention(p.output("out", width), q, k, v, **sizes)
        step = PageTables(np.random.default_rng(0), [len(values)]).step([(0, 0, len(values))])
        inputs = np.concatenate([np.zeros_like(values), values, values], axis=1)
        case = p.case([Run(step, {qkv.value: inputs})], kv_dtype=kv_dtype)
        (results,) = run(load(device, case), case)
        np.testing.assert_array_equal(next(reversed(results.values())), left_of(values, kv_dtype, given))
