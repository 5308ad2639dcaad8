"""What users of other engines have reported of quantised checkpoints, tried on tiny models. Each test names the report."""

from pathlib import Path

import numpy as np
import pytest
import torch
from folders import edit_config, tiny_model
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.loader import load_weights
from maga_transformer.models import build_program
from runner import Runner
from safetensors.torch import load_file, save_file
from test_quantized import IDS, METHODS, quantised_model


def logits(folder: Path) -> np.ndarray:
    backend = _core.reference_backend()  # a CPU widens fp8 to bf16
    return Runner(backend, open_checkpoint(str(folder)), length=len(IDS), tokens=len(IDS)).logits(IDS)


def load(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    program, _ = build_program(checkpoint)
    load_weights(_core.reference_backend(), program, checkpoint)


@pytest.mark.parametrize(
    ("kept", "stated", "head"),
    [
        ("layers.0.mlp", ["layers.0.mlp"], False),
        ("o_proj", ["o_proj"], False),
        ("q_proj", ["model.layers.0.self_attn.q_proj"], False),  # one part of a fused matrix
        ("", None, False),
        ("", [], True),
    ],
)
def test_linears_that_are_left_out(kept: str, stated: list[str] | None, head: bool, tmp_path: Path) -> None:
    """vllm #9832, llm-compressor #1820: modules_to_not_convert as part of a name, as null, and a head that is quantised."""
    expected = quantised_model("awq", tmp_path, kept=kept, head=head)
    settings = {**METHODS["awq"][0], "modules_to_not_convert": stated}
    edit_config(tmp_path, quantization_config=settings)
    np.testing.assert_allclose(logits(tmp_path), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "method", ["gptq-4", "gptq-order", "awq", "fp8-tensor", "fp8-block", "ct-fp8-tensor", "ct-int4-zeros", "ct-w8a8"]
)
def test_matrices_that_are_fused_in_the_file(method: str, tmp_path: Path) -> None:
    """sglang #29151, #14102, vllm #39765: q, k and v are one matrix in the file, with one scale for all."""
    expected = quantised_model(method, tmp_path, kind="phi3")
    assert any("qkv_proj" in name for name in load_file(tmp_path / "model.safetensors"))
    atol = 4e-2 if method == "gptq-order" else 1e-4  # which is widened to fp16
    np.testing.assert_allclose(logits(tmp_path), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("method", METHODS)
def test_every_part_must_be_there(method: str, tmp_path: Path) -> None:
    """vllm PR #54444: what is missing must not be left to what lay in memory. Groups of columns have a default."""
    quantised_model(method, tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    module = "model.layers.1.mlp.down_proj."
    parts = sorted(name for name in whole if name.startswith(module))
    assert len(parts) >= 2
    for part in parts:
        save_file({name: tensor for name, tensor in whole.items() if name != part}, file)
        if part.endswith("g_idx") and method != "gptq-order":
            load(tmp_path)
        else:
            with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.down_proj\.\w+ ?.*(is missing|has no)"):
                load(tmp_path)


@pytest.mark.parametrize("method", ["awq", "gptq-4", "ct-int4"])
def test_columns_that_groups_do_not_divide(method: str, tmp_path: Path) -> None:
    """vllm #11671, #17604; lmdeploy #2334: refused by the linear's name, never padded with zeros."""
    quantised_model(method, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():  # 64 columns are four groups of 16 there, and would be one and a half of 40
        if name.endswith(("scales", "qzeros")):
            tensors[name] = tensor[:2].contiguous() if tensor.shape[0] == 4 else tensor[:3].contiguous()
        elif name.endswith("weight_scale"):
            tensors[name] = tensor[:, :3].contiguous() if tensor.shape[1] == 4 else tensor[:, :5].contiguous()
        elif name.endswith("g_idx"):
            tensors[name] = torch.arange(tensor.shape[0], dtype=torch.int32) // 40
    save_file(tensors, file)
    if method != "ct-int4":
        edit_config(tmp_path, quantization_config={**METHODS[method][0], "group_size": 40})
    with pytest.raises(ValueError, match=r"_proj has \d+ columns in (groups of 40, the last is short|[35] groups)"):
        load(tmp_path)


def test_orders_of_columns_of_compressed_tensors(tmp_path: Path) -> None:
    """llm-compressor #2843: actorder "static" needs nothing of a reader; groups that are no runs of columns are refused by name."""
    expected = quantised_model("ct-int4", tmp_path)
    settings = METHODS["ct-int4"][0]
    group = settings["config_groups"]["group_0"]
    static = {"group_0": {**group, "weights": {**group["weights"], "actorder": "static"}}}
    edit_config(tmp_path, quantization_config={**settings, "config_groups": static})
    np.testing.assert_allclose(logits(tmp_path), expected, rtol=0, atol=1e-4)
    file = tmp_path / "model.safetensors"
    name = "model.layers.1.mlp.up_proj.weight_g_idx"
    save_file({**load_file(file), name: torch.arange(64, dtype=torch.int32).flip(0) // 16}, file)
    with pytest.raises(ValueError, match=r"the groups of model\.layers\.1\.mlp\.up_proj are no runs of columns .actorder"):
        load(tmp_path)


@pytest.mark.parametrize("method", ["bitsandbytes", "vptq", "aqlm", "quip", "squeezellm", "fp6"])
def test_methods_without_a_reader_are_named(method: str, tmp_path: Path) -> None:
    """sonar #1018, #1265; vllm #5569: those that this engine cannot read end before a weight is read."""
    tiny_model("llama", tmp_path)
    edit_config(tmp_path, quantization_config={"quant_method": method})
    with pytest.raises(ValueError, match=f"quant_method '{method}' is not supported .supported: gptq, awq, fp8"):
        load(tmp_path)
