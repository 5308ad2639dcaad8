"""The loader: order, progress, stacking, and errors of a backend or a file that reach the caller."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoints import gguf_from_model
from folders import tiny_model
from maga_transformer import loader
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.formats import read_weight
from maga_transformer.loader import load_weights
from maga_transformer.models import build_program


class Recorder:
    """A backend that keeps what it is given."""

    def __init__(self, refuse: str = "") -> None:
        self.refuse = refuse

    def pack_dense(self, name: str, shape: list[int], values: np.ndarray, dtype: str) -> Any:
        if name == self.refuse:
            raise ValueError(f"{name}: refused")
        assert values.flags.c_contiguous and values.flags.aligned and list(values.shape) == shape
        return name, dtype, values

    def stack(self, name: str, shape: list[int]) -> "RecordedStack":
        return RecordedStack(shape)

    def pack_affine(self, name: str, shape: list[int], codes: np.ndarray, **form: Any) -> Any:
        assert codes.flags.c_contiguous and list(codes.shape) == shape
        assert form["scale"].shape == (shape[0], shape[1] // form["group"])
        return name, f"affine{form['bits']}", codes


class RecordedStack:
    def __init__(self, shape: list[int]) -> None:
        self.shape = shape
        self.matrices: list[np.ndarray] = []

    def add_dense(self, values: np.ndarray, dtype: str) -> None:
        assert values.flags.c_contiguous and list(values.shape) == self.shape[1:]
        self.matrices.append(values)

    def finish(self) -> list[np.ndarray]:
        assert len(self.matrices) == self.shape[0]
        return self.matrices


@pytest.mark.parametrize("workers", [None, 1, 5])
def test_weights_come_in_the_order_of_the_program(workers: int | None, tmp_path: Path) -> None:
    tiny_model("qwen2", tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    program, _ = build_program(checkpoint)
    heard: list[tuple[int, int]] = []
    weights: list[Any] = load_weights(Recorder(), program, checkpoint, progress=lambda *done: heard.append(done), workers=workers)
    assert [name for name, _, _ in weights] == [name for name, _, _ in program.weights]
    for (_, dtype, values), (_, sources, _) in zip(weights, program.weights, strict=True):
        assert dtype == "fp32"
        np.testing.assert_array_equal(values, np.concatenate([checkpoint.tensor(source) for source in sources]))
    total = sum(checkpoint.nbytes(name) for name in checkpoint.names())
    assert heard == sorted(heard) and heard[-1] == (total, total) and {of for _, of in heard} == {total}


def test_experts_come_one_by_one(tmp_path: Path) -> None:
    tiny_model("mixtral", tmp_path, num_local_experts=5)
    checkpoint = open_checkpoint(str(tmp_path))
    program, _ = build_program(checkpoint)
    weights: list[Any] = load_weights(Recorder(), program, checkpoint)
    stacks = {name: weight for weight, (name, _, shape) in zip(weights, program.weights, strict=True) if len(shape) == 3}
    assert len(stacks) == 2 * 3
    for i in range(3):
        module = f"model.layers.{i}.block_sparse_moe.experts"
        for e, (gate_up, down) in enumerate(zip(stacks[f"{module}.(gate|up)"], stacks[f"{module}.down"], strict=True)):
            gate, up = (checkpoint.tensor(f"{module}.{e}.{name}.weight") for name in ("w1", "w3"))
            np.testing.assert_array_equal(gate_up, np.concatenate([gate, up]))
            assert np.shares_memory(down, checkpoint.tensor(f"{module}.{e}.w2.weight"))  # not copied


@pytest.mark.parametrize("kind", ["F32", "Q4_0"])
def test_no_more_is_under_way_than_memory_allows(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of codes as they are unfolded, a byte each."""
    model = tiny_model("llama", tmp_path / "folder", hidden_size=64, intermediate_size=96)
    quantize = None if kind == "F32" else lambda name: gguf.GGMLQuantizationType[kind]
    checkpoint = open_checkpoint(str(gguf_from_model(model, tmp_path / "m.gguf", quantize)))
    program, _ = build_program(checkpoint)
    sizes = [int(np.prod(shape)) * (1 if kind == "Q4_0" and len(shape) == 2 else 4) for _, _, shape in program.weights]
    limit = max(sizes) + sorted(sizes)[len(sizes) // 2]
    monkeypatch.setattr(loader, "_MOST_BYTES", limit)
    under_way: list[int] = []

    class Slow(Recorder):
        def wait(self, size: int) -> None:
            under_way.append(size)
            assert sum(under_way) <= limit
            time.sleep(0.002)
            under_way.remove(size)

        def pack_dense(self, name: str, shape: list[int], values: np.ndarray, dtype: str) -> Any:
            self.wait(values.nbytes)
            return super().pack_dense(name, shape, values, dtype)

        def pack_affine(self, name: str, shape: list[int], codes: np.ndarray, **form: Any) -> Any:
            self.wait(codes.nbytes)
            return super().pack_affine(name, shape, codes, **form)

    assert len(load_weights(Slow(), program, checkpoint, workers=8)) == len(sizes)


def test_quantised_weights_stay_quantised(tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path / "folder", hidden_size=64, intermediate_size=96)
    kinds = gguf.GGMLQuantizationType
    path = gguf_from_model(model, tmp_path / "m.gguf", lambda name: kinds.Q8_0 if "token_embd" in name else kinds.Q5_0)
    checkpoint = open_checkpoint(str(path))
    program, _ = build_program(checkpoint)
    weights: list[Any] = load_weights(Recorder(), program, checkpoint)
    assert {form for _, form, values in weights if values.ndim == 2} == {"affine5", "affine8"}
    for (_, _, codes), (_, sources, shape) in zip(weights, program.weights, strict=True):
        if len(shape) == 2:
            np.testing.assert_array_equal(codes, read_weight(checkpoint, sources).codes)


def test_what_a_backend_refuses_reaches_the_caller(tmp_path: Path) -> None:
    tiny_model("llama", tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    program, _ = build_program(checkpoint)
    with pytest.raises(ValueError, match=r"model\.norm\.weight: refused"):
        load_weights(Recorder(refuse="model.norm.weight"), program, checkpoint)


def test_types_that_no_weight_has(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tiny_model("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].char()
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(str(tmp_path))
    program, _ = build_program(checkpoint)
    with pytest.raises(ValueError, match=r"model\.safetensors: tensor model\.layers\.1\.mlp\.up_proj\.weight has the type int8"):
        load_weights(Recorder(), program, checkpoint)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_types_that_weights_may_have(dtype: str, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tiny_model("llama", tmp_path)
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(str(tmp_path))
    program, _ = build_program(checkpoint)
    weights: list[Any] = load_weights(Recorder(), program, checkpoint)
    kept = {"float64": "fp32", "bfloat16": "bf16", "float16": "fp16"}[dtype]
    assert {form for _, form, values in weights if values.ndim == 2} == {kept}
    assert {form for _, form, values in weights if values.ndim == 1} == {"fp32"}


def test_one_line_tells_of_all_widened_weights(caplog: pytest.LogCaptureFixture) -> None:
    weights: list[Any] = [
        SimpleNamespace(widened=why) for why in ("", "groups of 3 columns", "stacks of experts", "", "stacks of experts")
    ]
    loader.tell_of_widened(weights)
    assert [record.getMessage() for record in caplog.records] == [
        "3 quantised weights are held as dense values on this device (1: groups of 3 columns; 2: stacks of experts)"
    ]
    loader.tell_of_widened(weights[:1])
    assert len(caplog.records) == 1
