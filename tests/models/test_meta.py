"""Meta's and Mistral's own layout: a model of transformers cut into ranks gives its logits again."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import tiny_model
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.models import build_program
from runner import Runner
from safetensors.torch import save_file

IDS = np.random.default_rng(1).integers(0, 96, 40).tolist()
NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers.": "layers.",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def pairs_from_halves(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Row j of a head goes to 2j, row j + d/2 to 2j + 1."""
    rows = torch.empty(len(weight), dtype=torch.long)
    for row in range(len(weight)):
        head, j = divmod(row, head_dim)
        half = head_dim // 2
        rows[head * head_dim + (2 * j if j < half else 2 * (j - half) + 1)] = row
    return weight[rows]


def meta_tensors(model: torch.nn.Module, head_dim: int) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in model.state_dict().items():
        if "q_proj" in name or "k_proj" in name:
            tensor = pairs_from_halves(tensor, head_dim)
        for old, new in NAMES.items():
            name = name.replace(old, new)
        found[name] = tensor
    return found


def rank_of(name: str, tensor: torch.Tensor, rank: int, ranks: int, kv_heads: int, embedding_axis: int) -> torch.Tensor:
    if "norm" in name:
        return tensor
    axis = embedding_axis if "tok_" in name else int(any(part in name for part in (".wo.", ".w2.")))
    if ranks > kv_heads and (".wk." in name or ".wv." in name):
        rank, ranks = rank * kv_heads // ranks, kv_heads
    return tensor.chunk(ranks, axis)[rank].clone()


def expected(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0].numpy()
    assert np.abs(logits).max() > 0.5
    return logits


def check(folder: Path, logits: np.ndarray) -> Runner:
    runner = Runner(_core.reference_backend(), open_checkpoint(str(folder)), length=len(IDS), tokens=len(IDS))
    np.testing.assert_allclose(runner.logits(IDS), logits, rtol=0, atol=1e-4)
    return runner


PARAMS: dict[str, Any] = {"dim": 48, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 16, "norm_eps": 1e-5}


@pytest.mark.parametrize("embedding_axis", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks(ranks: int, embedding_axis: int, tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path / "hf")
    folder = tmp_path / "meta"
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps({**PARAMS, "vocab_size": -1}))
    tensors = meta_tensors(model, 12)
    for rank in range(ranks):
        own = {name: rank_of(name, tensor, rank, ranks, 2, embedding_axis) for name, tensor in tensors.items()}
        torch.save({**own, "rope.freqs": torch.ones(6)}, folder / f"consolidated.0{rank}.pth")
    assert check(folder, expected(model)).program.max_positions == 4096


def test_scaled_rope_of_llama_3(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = tiny_model("llama", tmp_path / "hf", rope_parameters=rope, num_key_value_heads=4)
    params = {**PARAMS, "rope_theta": 500000.0, "use_scaled_rope": True, "n_kv_heads": None}
    (tmp_path / "params.json").write_text(json.dumps(params))
    torch.save(meta_tensors(model, 12), tmp_path / "consolidated.00.pth")
    assert check(tmp_path, expected(model)).program.max_positions == 131072
    (tmp_path / "params.json").write_text(json.dumps({**params, "use_scaled_rope": False}))
    assert build_program(open_checkpoint(str(tmp_path)))[0].max_positions == 8192


def test_mistral(tmp_path: Path) -> None:
    model = tiny_model("mistral", tmp_path / "hf", head_dim=16, sliding_window=9)
    params = {**PARAMS, "head_dim": 16, "hidden_dim": 80, "sliding_window": 9, "vocab_size": 96}
    (tmp_path / "params.json").write_text(json.dumps(params))
    save_file(meta_tensors(model, 16), tmp_path / "consolidated.safetensors")
    check(tmp_path, expected(model))
    (tmp_path / "params.json").write_text(json.dumps({**params, "moe": {"num_experts": 8}}))
    with pytest.raises(ValueError, match=r"params\.json: moe: mixtures of experts in this layout are not supported"):
        open_checkpoint(str(tmp_path))


def test_yarn(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.0}
    model = tiny_model("mistral", tmp_path / "hf", sliding_window=None, rope_parameters=rope)
    yarn = {"factor": 4, "original_max_position_embeddings": 16, "apply_scale": False, "beta": 32, "alpha": 1}
    (tmp_path / "params.json").write_text(json.dumps({**PARAMS, "hidden_dim": 80, "yarn": yarn, "max_seq_len": 256}))
    save_file(meta_tensors(model, 12), tmp_path / "consolidated.safetensors")
    check(tmp_path, expected(model))


def test_ranks_that_do_not_fit(tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path / "hf")
    (tmp_path / "params.json").write_text(json.dumps({**PARAMS, "n_heads": 0}))
    with pytest.raises(FileNotFoundError, match="no weights here"):
        open_checkpoint(str(tmp_path))
    tensors = meta_tensors(model, 12)
    torch.save(tensors, tmp_path / "consolidated.00.pth")
    with pytest.raises(ValueError, match=r"params\.json: n_heads is 0, expected an integer from 1"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    torch.save({name: tensor for name, tensor in tensors.items() if name != "norm.weight"}, tmp_path / "consolidated.01.pth")
    with pytest.raises(ValueError, match=r"consolidated\.01\.pth: tensor norm\.weight is in one of this file and .*00\.pth only"):
        open_checkpoint(str(tmp_path))
    torch.save({**tensors, "layers.1.feed_forward.w1.weight": torch.ones(80, 47)}, tmp_path / "consolidated.01.pth")
    with pytest.raises(ValueError, match=r"01\.pth: layers\.1\.feed_forward\.w1\.weight has shape \(80, 47\)"):
        open_checkpoint(str(tmp_path))
    torch.save({**tensors, "layers.1.extra.weight": torch.ones(3)}, tmp_path / "consolidated.00.pth")
    (tmp_path / "consolidated.01.pth").unlink()
    with pytest.raises(ValueError, match=r"no place for these tensors: layers\.1\.extra\.weight"):
        build_program(open_checkpoint(str(tmp_path)))
