"""What is particular to DeepSeek's attention over latent states, beside the logits (test_families.py)."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from folders import edit_config
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.explain import explain
from maga_transformer.loader import load_weights
from maga_transformer.models import build_program
from rich.console import Console
from runner import Runner
from safetensors.torch import load_file, save_file
from tiny_families import IDS, LENGTH, native


def add_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file)


def test_pages_hold_one_latent_state_a_token(tmp_path: Path) -> None:
    native("deepseek-v2", tmp_path)
    program, _ = build_program(open_checkpoint(str(tmp_path)))
    assert program.cache_layers == [(1, 28, 20)] * 3  # kv_lora_rank 20 and 8 rotated columns
    assert program.page_bytes(16, "bf16") == 3 * 16 * 28 * 2


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    expected = native("deepseek-v3", tmp_path)
    add_tensors(tmp_path, {f"model.layers.3.{name}": torch.ones(48) for name in ("enorm.weight", "hnorm.weight")})
    checkpoint = open_checkpoint(str(tmp_path))
    runner = Runner(_core.reference_backend(), checkpoint, length=LENGTH, tokens=LENGTH)
    np.testing.assert_allclose(runner.logits(IDS), expected, rtol=0, atol=1e-4)
    edit_config(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(ValueError, match=r"no place for these tensors: model\.layers\.3\.enorm\.weight"):
        build_program(open_checkpoint(str(tmp_path)))


def test_quantised_at_load(tmp_path: Path) -> None:
    """Each head's matrices stay as they are: they are small, and one of them would be rounded across its groups."""
    native("deepseek-v3", tmp_path)
    checkpoint, backend = open_checkpoint(str(tmp_path)), _core.cpu_backend(threads=1)
    program, _ = build_program(checkpoint)
    exact, rounded = (
        dict(zip((name for name, _, _ in program.weights), load_weights(backend, program, checkpoint, quantization=q), strict=True))
        for q in ("", "int8")
    )
    changed = {name for name in exact if rounded[name].bytes != exact[name].bytes}
    assert any("kv_a_proj_with_mqa" in name for name in changed)
    assert not any("absorbed" in name or "gate.weight" in name for name in changed)


def test_explained(tmp_path: Path) -> None:
    native("deepseek-v2-lite", tmp_path)
    out = io.StringIO()
    explain(str(tmp_path), console=Console(file=out, width=200), batch=4, context=100, bandwidth_gb=10.0, gflops=100.0)
    shown = out.getvalue()
    assert "4 heads on 1 of 28" in shown and "self_attn.absorbed_keys" in shown and "4 x 20 x 12 fp32" in shown


REFUSED = {
    "deepseek-v2": [
        ({"topk_method": "random"}, "config key topk_method is 'random', expected greedy or group_limited_greedy"),
        ({"norm_topk_prob": True}, "config key norm_topk_prob is True, which is not supported"),
        ({"moe_layer_freq": 2}, "config key moe_layer_freq is 2, which is not supported"),
        ({"kv_lora_rank": 24}, r"kv_a_proj_with_mqa\.weight has shape \(28, 48\), expected \(32, 48\)"),
        ({"v_head_dim": 12}, r"kv_b_proj\.weight has shape \(88, 20\), expected \(96, 20\)"),
        ({"q_lora_rank": None}, r"q_proj\.weight is missing \(expected shape \(80, 48\)\)"),
        ({"num_experts_per_tok": 99}, "num_experts_per_tok is 99, expected at most the number of experts, which is 16"),
    ],
    "deepseek-v3": [
        ({"n_group": 3}, "16 experts in 3 groups"),
        ({"num_nextn_predict_layers": -1}, "config key num_nextn_predict_layers is -1"),
    ],
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_run_is_named(case: str, tmp_path: Path) -> None:
    native(case, tmp_path)
    original = (tmp_path / "config.json").read_text()
    for changes, message in REFUSED[case]:
        (tmp_path / "config.json").write_text(original)
        edit_config(tmp_path, **changes)
        with pytest.raises(ValueError, match=message) as error:
            build_program(open_checkpoint(str(tmp_path)))
        assert str(tmp_path) in str(error.value)
