"""transformers reads what `maga quantize` writes, and we read what others write: the same greedy text on both sides."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from folders import edit_config
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.formats import open_quantized, read_weight
from maga_transformer.quantize import convert
from runner import Runner
from tiny import calibration, model_folder, recipe
from transformers import AutoModelForCausalLM

PROMPTS = [np.random.default_rng(i).integers(0, 96, 12).tolist() for i in range(3)]
NEW = 16


def needs(package: str) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed (pip install --no-deps {package.replace('_', '-')})")


def ours(folder: Path) -> list[list[int]]:
    backend = _core.cpu_backend(threads=1, quantize_activations=False)
    runner = Runner(backend, open_checkpoint(str(folder)), length=40, tokens=64, sequences=len(PROMPTS))
    return runner.greedy(PROMPTS, NEW, frozenset())


def theirs(folder: Path) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # no token ends a text
    with torch.no_grad():
        made = [
            model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0] for prompt in PROMPTS
        ]
    return [ids.tolist()[len(prompt) :] for ids, prompt in zip(made, PROMPTS, strict=True)]


def close(folder: Path) -> None:
    """Logits, where values are rounded in different places. What transformers does to activations is left out: here they stay."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    for group in config["config_groups"].values():
        group["input_activations"] = None
    edit_config(folder, quantization_config=config)
    ids = PROMPTS[0]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([ids])).logits[0].numpy()
    backend = _core.cpu_backend(threads=1, quantize_activations=False)
    found = Runner(backend, open_checkpoint(str(folder)), length=len(ids), tokens=len(ids)).logits(ids)
    np.testing.assert_allclose(found, expected, atol=0.06 * expected.std(), rtol=0.05)


@pytest.mark.parametrize(
    ("method", "package"),
    [("int8", "compressed_tensors"), ("gptq", "gptqmodel"), ("awq", "gptqmodel"), ("fp8", "compressed_tensors")],
)
def test_transformers_reads_what_we_write(method: str, package: str, tmp_path: Path) -> None:
    needs(package)
    model_folder("llama", tmp_path / "in", attention_bias=True)
    convert(str(tmp_path / "in"), str(tmp_path / "out"), recipe(method), calibration(tmp_path), threads=1)
    if method == "fp8":
        close(tmp_path / "out")
    else:
        assert theirs(tmp_path / "out") == ours(tmp_path / "out")


def test_others_convert_what_we_write(tmp_path: Path) -> None:
    """compressed-tensors reads our AWQ layout, and makes its own of it."""
    needs("compressed_tensors")
    from compressed_tensors.entrypoints.convert import AutoAWQConverter, convert_checkpoint

    model_folder("llama", tmp_path / "in")
    convert(str(tmp_path / "in"), str(tmp_path / "awq"), recipe("awq"), calibration(tmp_path), threads=1)
    converter = AutoAWQConverter.from_pretrained(str(tmp_path / "awq"))
    convert_checkpoint(str(tmp_path / "awq"), str(tmp_path / "converted"), converter, max_workers=1)
    before, after = (open_quantized(open_checkpoint(str(tmp_path / folder))) for folder in ("awq", "converted"))
    for name in before.names():
        expected = read_weight(before, [name]).dequantize()
        np.testing.assert_allclose(read_weight(after, [name]).dequantize(), expected, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("scheme", ["W4A16", "W8A16", "FP8_DYNAMIC"])
def test_we_read_what_compressed_tensors_writes(scheme: str, tmp_path: Path) -> None:
    needs("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme

    model = model_folder("llama", tmp_path / "in")
    group = preset_name_to_scheme(scheme, ["Linear"])
    if group.weights.group_size:
        group.weights.group_size = 32
    config = QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"], quantization_status="frozen")
    apply_quantization_config(model, config)
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "weight_scale"):
                parts = module.weight.reshape(len(module.weight), module.weight_scale.shape[1], -1)
                largest = {"W4A16": 7.5, "W8A16": 127.5, "FP8_DYNAMIC": 448.0}[scheme]
                module.weight_scale.copy_((parts.abs().amax(-1) / largest).half())
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path / "out")
    compressor.update_config(str(tmp_path / "out"))
    if scheme == "FP8_DYNAMIC":
        close(tmp_path / "out")
    else:
        assert theirs(tmp_path / "out") == ours(tmp_path / "out")
