"""ggml block formats against the `gguf` package: bit for bit on random blocks, and on weights that gguf quantised itself."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from checkpoints import dequantize, write_gguf
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.formats import Affine, Dense, concatenate, read_weight
from maga_transformer.formats.ggml import FORMATS, affine_from_blocks

# Codes of formats whose levels are a table.
LARGEST = {
    "iq1_s": 9, "iq1_m": 9, "iq2_xxs": 128 + 43, "iq2_xs": 128 + 43, "iq2_s": 128 + 43, "iq3_xxs": 128 + 62,
    "iq4_nl": 128 + 113, "iq4_xs": 128 + 113, "mxfp4": 12 + 12, "nvfp4": 12 + 12, "tq1_0": 2, "q1_0": 2,
}  # fmt: skip
QUANTIZABLE = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")


def ggml_type(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name.upper()]


def random_blocks(name: str, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Every byte random, so every code, scale and sign occurs; some fp16 scales are infinite or NaN."""
    return np.random.default_rng(seed).integers(0, 256, (rows, blocks * FORMATS[name].nbytes), dtype=np.uint8)


@pytest.mark.parametrize("name", FORMATS)
def test_block_sizes_are_those_of_gguf(name: str) -> None:
    elements, nbytes = gguf.GGML_QUANT_SIZES[ggml_type(name)]
    assert (FORMATS[name].elements, FORMATS[name].nbytes) == (elements, nbytes)


@pytest.mark.parametrize("name", FORMATS)
def test_random_blocks_are_equal_bit_for_bit(name: str) -> None:
    blocks = random_blocks(name, rows=512 if name.startswith("iq") else 64, blocks=6)  # 2048 points of a grid, each many times
    with np.errstate(all="ignore"):
        expected = dequantize(blocks, ggml_type(name))
        found = affine_from_blocks(name, blocks)
        values = found.dequantize()
    assert np.isfinite(expected).mean() > 0.8
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(values[finite], expected[finite])
    assert not np.isfinite(values[~finite]).any()
    assert int(found.codes.max()) == LARGEST.get(name, 2**found.bits - 1)
    assert found.codes.shape[1] % found.group == 0
    assert found.scale.dtype == np.float32 and found.scale.flags.c_contiguous


@pytest.mark.parametrize("name", QUANTIZABLE)
def test_quantised_weights_come_back(name: str) -> None:
    values = np.random.default_rng(3).normal(0, 1, (16, 256)).astype(np.float32)
    blocks = gguf.quants.quantize(values, ggml_type(name))
    found = affine_from_blocks(name, blocks).dequantize()
    np.testing.assert_array_equal(found, dequantize(blocks, ggml_type(name)))
    assert np.abs(found - values).max() < (0.02 if name == "q8_0" else 0.5)


def test_golden_q4_1_block() -> None:
    """By hand: d = 0.5, m = -2, nibbles 0 to 15 low and 15 to 0 high."""
    block = np.concatenate(
        [np.array([0.5, -2.0], np.float16).view(np.uint8), np.array([i | (15 - i) << 4 for i in range(16)], np.uint8)]
    )
    found = affine_from_blocks("q4_1", block[None])
    expected = [0.5 * i - 2 for i in range(16)] + [0.5 * (15 - i) - 2 for i in range(16)]
    np.testing.assert_array_equal(found.dequantize(), [expected])


def test_golden_q1_0_block() -> None:
    """By hand, as gguf cannot read it: d = -0.5, and of each byte the lowest bit first."""
    block = np.concatenate([np.array([-0.5], np.float16).view(np.uint8), np.array([0b00000110, *[255] * 15], np.uint8)])
    expected = [0.5, -0.5, -0.5, *[0.5] * 5, *[-0.5] * 120]
    np.testing.assert_array_equal(affine_from_blocks("q1_0", block[None]).dequantize(), [expected])


@pytest.mark.parametrize("name", [*FORMATS, "f32", "f16", "bf16"])
def test_through_a_file(name: str, tmp_path: Path) -> None:
    kind = ggml_type(name)
    if name in FORMATS:
        stored = random_blocks(name, rows=5, blocks=2)
        with np.errstate(all="ignore"):
            expected = dequantize(stored, kind)
    else:
        expected = np.random.default_rng(1).normal(0, 1, (5, 64)).astype(np.float32)
        stored = gguf.quants.quantize(expected, kind)
        expected = dequantize(stored, kind)
    path = write_gguf(tmp_path / "model.gguf", {}, {"some.weight": (stored, kind)}, architecture="other")
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.shape("some.weight") == expected.shape
    with np.errstate(all="ignore"):
        weight = read_weight(checkpoint, ["some.weight"])
        np.testing.assert_array_equal(weight.dequantize(), expected)
    if name in ("f16", "bf16"):
        assert isinstance(weight, Dense) and weight.dtype == {"f16": "fp16", "bf16": "bf16"}[name]


def test_stacked_sources_are_their_rows(tmp_path: Path) -> None:
    kind = ggml_type("q5_1")
    parts = {f"{name}.weight": (random_blocks("q5_1", rows, 4, seed=rows), kind) for name, rows in (("a", 3), ("b", 7))}
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "model.gguf", {}, parts, architecture="other")))
    both = read_weight(checkpoint, ["a.weight", "b.weight"])
    with np.errstate(all="ignore"):
        expected = np.concatenate([dequantize(data, kind) for data, _ in parts.values()])
        np.testing.assert_array_equal(both.dequantize(), expected)


def test_stacking_refuses_different_formats() -> None:
    q4 = affine_from_blocks("q4_1", random_blocks("q4_1", 2, 8))
    for other in (affine_from_blocks("q6_k", random_blocks("q6_k", 2, 1)), Dense(np.zeros((2, 256), np.float32), "fp32")):
        with pytest.raises(ValueError, match="different formats"):
            concatenate([q4, other])
        with pytest.raises(ValueError, match="different formats"):
            concatenate([other, q4])


def test_dense_widens_exactly() -> None:
    bits = np.arange(0, 65536, 7, dtype=np.uint16)
    wide = Dense(bits, "bf16").dequantize()
    np.testing.assert_array_equal(wide.view(np.uint32) >> 16, bits)
    halves = bits.view(np.float16)
    np.testing.assert_array_equal(Dense(halves, "fp16").dequantize(), halves.astype(np.float32))


def test_affine_formula() -> None:
    codes = np.array([[0, 1, 2, 3]], np.uint8)
    weight = Affine(codes, 2, 2, np.array([[2.0, 10.0]], np.float32), np.array([[0.5, -1.0]], np.float32), 1)
    np.testing.assert_array_equal(weight.dequantize(), [[-1.5, 0.5, 9.0, 19.0]])
