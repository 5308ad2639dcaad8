"""Weights made of rows of stored tensors: what a source selects, in every format, and rows of length 1."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from checkpoints import write_gguf
from folders import write_folder
from maga_transformer.checkpoint import Checkpoint, Source, open_checkpoint, stored_bytes
from maga_transformer.formats import Affine, Dense, read_weight
from maga_transformer.formats.canonical import rounded, unit_rows
from maga_transformer.formats.ggml import FORMATS

SOURCES = {
    "a.weight": Source("a.weight"),
    "a.weight[2:4/6]": Source("a.weight", 2, 4, 6),
    "a.weight[unit]": Source("a.weight", unit=True),
    "a.weight[0:5/12][unit]": Source("a.weight", 0, 5, 12, unit=True),
    "a.weight[*0.0625]": Source("a.weight", factor=0.0625),
    "a.weight[0:5/12][unit][*1e-05]": Source("a.weight", 0, 5, 12, unit=True, factor=1e-5),
    "odd[name].weight": Source("odd[name].weight"),
    "a.weight[transposed]": Source("a.weight", layout="transposed"),
    "a.weight[transposed][2:4/6][*0.5]": Source("a.weight", 2, 4, 6, factor=0.5, layout="transposed"),
    "a.weight[flat]": Source("a.weight", layout="flat"),
}


@pytest.mark.parametrize("text", SOURCES)
def test_text(text: str) -> None:
    assert Source.parse(text) == SOURCES[text]
    assert str(SOURCES[text]) == text


def quantised(name: str, folder: Path, rows: int) -> Checkpoint:
    blocks = np.random.default_rng(0).integers(0, 256, (rows, 2 * FORMATS[name].nbytes), dtype=np.uint8)
    tensors = {"a.weight": (blocks, gguf.GGMLQuantizationType[name.upper()])}
    return open_checkpoint(str(write_gguf(folder / "model.gguf", {}, tensors, architecture="other")))


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_block_formats(name: str, tmp_path: Path) -> None:
    checkpoint = quantised(name, tmp_path, 12)
    selections = {"a.weight[1:3/4]": [1, 2, 5, 6, 9, 10], "a.weight[5:9/12]": [5, 6, 7, 8]}
    with np.errstate(all="ignore"):
        whole = read_weight(checkpoint, ["a.weight"]).dequantize()
        for source, rows in selections.items():
            np.testing.assert_array_equal(read_weight(checkpoint, [source]).dequantize(), whole[rows])
        both = read_weight(checkpoint, list(selections)).dequantize()
    np.testing.assert_array_equal(both, whole[[row for rows in selections.values() for row in rows]])
    assert stored_bytes(checkpoint, list(selections)) == checkpoint.nbytes("a.weight") * 10 // 12


def test_block_formats_are_not_transposed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.gguf: tensor a\.weight has the type q4_0, its blocks lie along rows"):
        read_weight(quantised("q4_0", tmp_path, 4), ["a.weight[transposed]"])


@pytest.mark.parametrize("name", ["q4_0", "q5_1", "q6_k"])
def test_factor_of_block_formats(name: str, tmp_path: Path) -> None:
    checkpoint = quantised(name, tmp_path, 4)
    with np.errstate(all="ignore"):
        expected = read_weight(checkpoint, ["a.weight"]).dequantize() * np.float32(0.25)
        np.testing.assert_array_equal(read_weight(checkpoint, ["a.weight[*0.25]"]).dequantize(), expected)


def test_rows_of_dense_tensors(tmp_path: Path) -> None:
    matrix, vector = np.arange(24, dtype=np.float32).reshape(12, 2), np.arange(12, dtype=np.float16)
    checkpoint = open_checkpoint(str(write_folder(tmp_path, {}, {"a.weight": matrix, "a.bias": vector})))
    np.testing.assert_array_equal(read_weight(checkpoint, ["a.weight[2:3/3]"]).dequantize(), matrix[2::3])
    np.testing.assert_array_equal(read_weight(checkpoint, ["a.bias[0:1/6]", "a.bias[5:6/6]"]).dequantize(), [0, 6, 5, 11])
    np.testing.assert_array_equal(read_weight(checkpoint, ["a.bias[*0.3]"]).dequantize(), vector * np.float32(0.3))
    np.testing.assert_array_equal(read_weight(checkpoint, ["a.weight[transposed]"]).dequantize(), matrix.T)
    np.testing.assert_array_equal(read_weight(checkpoint, ["a.weight[transposed][1:2/2]"]).dequantize(), matrix.T[1:])
    np.testing.assert_array_equal(read_weight(checkpoint, ["a.weight[flat]"]).dequantize(), matrix.reshape(-1))
    stored = checkpoint.tensor("a.weight")
    assert np.shares_memory(Source("a.weight", layout="transposed").rows_of(stored), stored)
    assert np.shares_memory(Source("a.weight", 3, 7, 12).rows_of(stored), stored)  # one range: nothing is copied
    with pytest.raises(ValueError, match=r"tensor a\.weight has 12 rows, not a multiple of 5"):
        read_weight(checkpoint, ["a.weight[0:1/5]"])


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_unit_rows_are_torchs(dtype: str) -> None:
    values = np.random.default_rng(0).normal(0, 3, (5000, 24)).astype(np.float32)
    values[7] = 0
    weight = Dense(rounded(values, dtype), dtype)
    found = unit_rows(weight)
    assert isinstance(found, Dense) and found.dtype == dtype
    expected = torch.nn.functional.normalize(torch.from_numpy(weight.dequantize()))
    expected = expected.to({"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]).float().numpy()
    np.testing.assert_allclose(found.dequantize(), expected, rtol=0, atol={"fp32": 1e-6, "fp16": 5e-4, "bf16": 4e-3}[dtype])
    assert (found.dequantize() == expected).mean() > 0.9 or dtype == "fp32"


@pytest.mark.parametrize("name", ["q4_0", "q5_1", "q6_k"])
def test_unit_rows_of_block_formats(name: str) -> None:
    form = FORMATS[name]
    random = np.random.default_rng(0)
    scale = random.uniform(0.1, 1, (8, 64 // form.group)).astype(np.float32)
    codes = random.integers(0, 2**form.bits, (8, 64), dtype=np.uint8)
    weight = Affine(codes, form.bits, form.group, scale, -scale if name == "q5_1" else None, form.zero)
    found = unit_rows(weight)
    assert isinstance(found, Affine) and found.codes is weight.codes
    expected = weight.dequantize() / np.linalg.norm(weight.dequantize(), axis=1, keepdims=True)
    np.testing.assert_allclose(found.dequantize(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype, kind", [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_rounding_is_torchs(dtype: str, kind: torch.dtype) -> None:
    values = np.random.default_rng(0).normal(0, 1, 10000).astype(np.float32)
    values[:2] = [1 + 2**-8, 1 + 3 * 2**-8]  # ties of bf16
    np.testing.assert_array_equal(
        Dense(rounded(values, dtype), dtype).dequantize(), torch.from_numpy(values).to(kind).float().numpy()
    )
