"""Rounding of dense weights at load: how far codes are from the weights, and which weights are rounded."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import tiny_model
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.formats import Affine, Dense, Float8
from maga_transformer.formats.canonical import rounded
from maga_transformer.loader import load_weights
from maga_transformer.models import build_program

RNG = np.random.default_rng(6)


def quantize(values: np.ndarray, bits: int, group: int, dtype: str = "fp32") -> Affine:
    codes, scale, zero = _core.quantize(values, dtype, bits=bits, group=group, name="w")
    return Affine(codes, bits, group, scale, None, zero)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("columns", [16, 40, 256])
def test_eight_bits(columns: int, dtype: str) -> None:
    w = RNG.normal(0, 0.02, (7, columns)).astype(np.float32)
    stored = rounded(w, dtype)
    exact = (stored.astype(np.uint32) << 16).view(np.float32) if dtype == "bf16" else stored.astype(np.float32)
    q = quantize(stored, 8, columns, dtype)
    assert (q.codes.min(), q.codes.max(), q.zero) == (q.codes.min(), q.codes.max(), 128) and q.codes.min() >= 1
    np.testing.assert_allclose(q.scale[:, 0], np.abs(exact).max(1) / 127, rtol=1e-3)
    assert (np.abs(q.dequantize() - exact) <= q.scale * 0.5001 + np.abs(exact).max() * 1e-3).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("group", [16, 20, 128])
def test_few_bits_beat_plain_rounding(bits: int, group: int) -> None:
    w = RNG.standard_t(5, (32, 4 * group)).astype(np.float32)
    q = quantize(w, bits, group)
    assert q.codes.max() < 1 << bits
    blocks = w.reshape(-1, group)
    top = (1 << (bits - 1)) - 1
    scale = np.abs(blocks).max(1, keepdims=True) / top
    plain = ((blocks - scale * np.clip(np.rint(blocks / scale), -top - 1, top)) ** 2).sum()
    ours = ((w - q.dequantize()) ** 2).sum()
    assert ours < (0.9 if bits < 6 else 0.95) * plain
    np.testing.assert_array_equal(q.scale, q.scale.astype(np.float16).astype(np.float32))


def test_values_at_the_edges() -> None:
    w = np.zeros((4, 32), np.float32)
    w[1] = 1e-30  # far below what an fp16 scale holds
    w[2, 3] = -70000.0  # beyond it
    w[3, ::2] = 5.0
    for bits in (4, 8):
        q = quantize(w, bits, 32)
        assert not q.dequantize()[0].any()
        np.testing.assert_allclose(q.dequantize(), w, rtol=2e-2, atol=0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(value: float) -> None:
    w = np.ones((3, 16), np.float32)
    w[2, 5] = value
    with pytest.raises(ValueError, match="weight w has values in row 2 that are not finite"):
        quantize(w, 4, 16)


def test_groups_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="weight w: groups of 16 columns do not divide it"):
        quantize(np.ones((2, 24), np.float32), 4, 16)
    with pytest.raises(ValueError, match="weight w: 9 bits"):
        quantize(np.ones((2, 16), np.float32), 9, 16)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_fp8(dtype: str) -> None:
    """The codes that torch makes of values divided by the scale."""
    stored = rounded(RNG.normal(0, 0.02, (9, 100)).astype(np.float32) * np.logspace(-6, 3, 9, dtype=np.float32)[:, None], dtype)
    exact = Dense(stored, dtype).dequantize()
    exact[4] = 0
    stored[4] = 0
    codes, scale = _core.quantize_fp8(stored, dtype, name="w")
    np.testing.assert_allclose(scale[:, 0], np.abs(exact).max(1) / 448, rtol=1e-6)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    expected = torch.from_numpy(exact * inverse).to(torch.float8_e4m3fn)
    np.testing.assert_array_equal(codes, expected.view(torch.uint8).numpy())
    found = Float8(codes, (1, 100), scale).dequantize()
    assert (np.abs(found - exact) <= np.abs(exact) * 2.0**-4 + scale * 2.0**-10).all()
    stored[3, 7] = np.array(0x7F80 if dtype == "bf16" else np.inf).astype(stored.dtype)
    with pytest.raises(ValueError, match="weight w has values in row 3 that are not finite"):
        _core.quantize_fp8(stored, dtype, name="w")
    with pytest.raises(ValueError, match="weight w: only matrices"):
        _core.quantize_fp8(stored[0], dtype, name="w")


class Noted(str):
    """A weight's name, in place of a packed weight."""

    widened = ""


class Recorder:
    """A backend that notes in which form weights come."""

    def __init__(self) -> None:
        self.forms: dict[str, str] = {}

    def pack_dense(self, name: str, shape: list[int], values: np.ndarray, dtype: str) -> Any:
        self.forms[name] = "dense"
        return Noted(name)

    def pack_affine(self, name: str, shape: list[int], codes: np.ndarray, *, bits: int, group: int, **numbers: Any) -> Any:
        self.forms[name] = f"{bits} by {group}"
        return Noted(name)

    def pack_float8(self, name: str, shape: list[int], codes: np.ndarray, *, block: tuple[int, int], **numbers: Any) -> Any:
        self.forms[name] = f"fp8 by {block}"
        return Noted(name)

    def stack(self, name: str, shape: list[int]) -> Any:
        recorder = self

        class Stack:
            def add_dense(self, values: np.ndarray, dtype: str) -> None:
                recorder.forms[name] = "dense"

            def add_affine(self, codes: np.ndarray, *, bits: int, group: int, **numbers: Any) -> None:
                recorder.forms[name] = f"{bits} by {group}"

            def add_float8(self, codes: np.ndarray, *, block: tuple[int, int], **numbers: Any) -> None:
                recorder.forms[name] = f"fp8 by {block}"

            def finish(self) -> Any:
                return Noted(name)

        return Stack()


@pytest.mark.parametrize("method, form", [("int8", "8 by {0}"), ("int4", "4 by 64"), ("fp8", "fp8 by (1, {0})"), ("", "dense")])
def test_which_weights_are_rounded(method: str, form: str, tmp_path: Path) -> None:
    tiny_model("qwen2_moe", tmp_path, hidden_size=64, moe_intermediate_size=64, shared_expert_intermediate_size=64)
    checkpoint = open_checkpoint(str(tmp_path))
    program, _ = build_program(checkpoint)
    recorder = Recorder()
    load_weights(recorder, program, checkpoint, quantization=method)  # type: ignore[arg-type]
    shapes = {name: shape for name, _, shape in program.weights}
    for name, found in recorder.forms.items():
        keeps = any(part in name for part in ("embed", "lm_head", "norm", "bias", "mlp.gate.", "shared_expert_gate"))
        if "shared_expert_gate" in name:
            continue  # one row: rounded like any linear's
        assert found == ("dense" if keeps else form.format(shapes[name][-1])), name


def test_a_rounded_model_is_close(tmp_path: Path) -> None:
    from runner import Runner

    tiny_model("llama", tmp_path, hidden_size=256, intermediate_size=512)
    checkpoint = open_checkpoint(str(tmp_path))
    ids = RNG.integers(0, 96, 40).tolist()
    backend = _core.cpu_backend(threads=1, quantize_activations=False)
    exact = Runner(backend, checkpoint, length=40, tokens=40).logits(ids)
    errors = {}
    for method in ("int8", "fp8", "int4"):
        found = Runner(backend, checkpoint, length=40, tokens=40, quantization=method).logits(ids)
        errors[method] = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert errors["int8"] < 0.05 < errors["int4"] < 0.5, errors
    assert errors["int8"] < errors["fp8"] < 0.2, errors
