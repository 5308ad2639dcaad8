"""DeepSeek-V2 and V3 through GGUF: kv_b_proj cut into each head's key and value matrix, or whole as in older files."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoints import write_gguf
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.formats import read_weight
from maga_transformer.models import build_program
from runner import Runner
from safetensors.numpy import load_file
from test_irregular import IDS as PRUNED_IDS
from test_irregular import LATENT_HEADS, prune_latent
from tiny_families import IDS, LENGTH, NATIVE, native

Q = gguf.GGMLQuantizationType
CASES = ["deepseek-v2", "deepseek-v2-lite", "deepseek-v3"]


@pytest.fixture(autouse=True)
def _one_scale_of_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """GGUF has no key for an mscale that differs from mscale_all_dim."""
    for case in CASES:
        kind, settings = NATIVE[case]
        if "rope_parameters" in settings:
            rope = {**settings["rope_parameters"], "mscale": settings["rope_parameters"]["mscale_all_dim"]}
            monkeypatch.setitem(NATIVE, case, (kind, {**settings, "rope_parameters": rope}))


def write(
    folder: Path, path: Path, *, whole: bool = False, quantize: Q | None = None, sizes: dict[str, list[int]] | None = None
) -> Path:
    """`sizes`: metadata that differs between layers."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.DEEPSEEK2, 3)
    heads, nope, v_dim, latent = (config[key] for key in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank"))
    stored: dict[str, tuple[np.ndarray, Q]] = {}
    stacks: dict[str, list[np.ndarray]] = {}

    def put(name: str, data: np.ndarray, kind: str = "weight") -> None:
        found = names.get_name(name)
        assert found, name
        data = np.ascontiguousarray(data, np.float32)
        packed = quantize is not None and data.ndim > 1 and "gate_inp" not in found and data.shape[-1] % 32 == 0
        stored[f"{found}.{kind}"] = (gguf.quants.quantize(data, quantize), quantize) if packed else (data, Q.F32)

    tensors = load_file(folder / "model.safetensors")
    for name in sorted(tensors, key=lambda name: [int(part) if part.isdigit() else part for part in name.split(".")]):
        data, (base, _, kind) = tensors[name], name.rpartition(".")
        parts = base.split(".")
        if "experts" in parts:
            stacks.setdefault(".".join([*parts[:-2], parts[-1]]), []).append(data)
        elif kind == "e_score_correction_bias":
            put(f"{base}.e_score_correction", data, "bias")
        elif base.endswith("kv_b_proj") and not whole:
            keys, values = np.split(data.reshape(-1, nope + v_dim, latent), [nope], axis=1)
            put(base.replace("kv_b_proj", "k_b_proj"), keys.transpose(0, 2, 1))
            put(base.replace("kv_b_proj", "v_b_proj"), values)
        else:
            put(base, data, kind)
    for name, experts in stacks.items():
        put(name, np.stack(experts))
    rope = config["rope_parameters"]
    rotary = config["qk_rope_head_dim"]
    metadata: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": heads if whole else 1,
        "attention.key_length": nope + rotary if whole else latent + rotary,
        "attention.value_length": v_dim if whole else latent,
        "attention.kv_lora_rank": latent,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": rotary,
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": bool(config["norm_topk_prob"]),
        "expert_gating_func": 2 if config["model_type"] == "deepseek_v3" else 1,
        "leading_dense_block_count": config["first_k_dense_replace"],
    }
    if not whole:
        metadata |= {"attention.key_length_mla": nope + rotary, "attention.value_length_mla": v_dim}
    if config["q_lora_rank"] is not None:
        metadata["attention.q_lora_rank"] = config["q_lora_rank"]
    if config.get("n_group"):
        metadata |= {"expert_group_count": config["n_group"], "expert_group_used_count": config["topk_group"]}
    if rope["rope_type"] == "yarn":
        metadata |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        }
    metadata |= sizes or {}
    return write_gguf(path, {f"deepseek2.{key}": value for key, value in metadata.items()}, stored, architecture="deepseek2")


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_logits(case: str, whole: bool, tmp_path: Path) -> None:
    expected = native(case, tmp_path / "folder")
    assert np.abs(expected).max() > 0.5
    checkpoint = open_checkpoint(str(write(tmp_path / "folder", tmp_path / "m.gguf", whole=whole)))
    runner = Runner(_core.reference_backend(), checkpoint, length=LENGTH, tokens=LENGTH)
    assert runner.family.model_type == ("deepseek3" if case == "deepseek-v3" else "deepseek2")
    np.testing.assert_allclose(runner.logits(IDS), expected, rtol=0, atol=1e-4)
    program, _ = build_program(open_checkpoint(str(tmp_path / "folder")))
    assert runner.program.page_bytes(16, "fp32") == program.page_bytes(16, "fp32") == 3 * 16 * (20 + 8) * 4


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_pruned(case: str, whole: bool, told: bool, tmp_path: Path) -> None:
    """All heads, two of them, none; half of a dense MLP's units. `told`: by lists in the metadata, else by the shapes alone."""
    expected = prune_latent(case, tmp_path / "folder")
    heads = [len(kept) for kept in LATENT_HEADS]
    sizes = {"attention.head_count": heads, "feed_forward_length": [40, 0, 0]} if told else {}
    if told:
        sizes["attention.head_count_kv"] = heads if whole else [min(count, 1) for count in heads]
    checkpoint = open_checkpoint(str(write(tmp_path / "folder", tmp_path / "m.gguf", whole=whole, sizes=sizes)))
    runner = Runner(_core.reference_backend(), checkpoint, length=LENGTH, tokens=LENGTH)
    np.testing.assert_allclose(runner.logits(PRUNED_IDS), expected, rtol=0, atol=1e-4)
    assert runner.program.cache_layers == [(1, 28, 20)] * 2


def test_quantised_matrices_of_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, settings = NATIVE["deepseek-v3"]
    sizes = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "moe_intermediate_size": 32, "hidden_size": 64}
    monkeypatch.setitem(NATIVE, "deepseek-v3", (kind, {**settings, **sizes}))
    native("deepseek-v3", tmp_path / "folder")
    exact = open_checkpoint(str(write(tmp_path / "folder", tmp_path / "exact.gguf")))
    packed = open_checkpoint(str(write(tmp_path / "folder", tmp_path / "packed.gguf", quantize=Q.Q8_0)))
    program, _ = build_program(packed)
    heads = 0
    for name, sources, _ in program.weights:
        heads += "absorbed" in name
        for source in sources if "absorbed" in name else []:
            want, got = (read_weight(checkpoint, [source]).dequantize() for checkpoint in (exact, packed))
            np.testing.assert_allclose(got, want, rtol=0, atol=np.abs(want).max() / 127)
    assert heads == 6 and packed.dtype("model.layers.1.self_attn.k_b_proj.weight") == "q8_0"
    Runner(_core.cpu_backend(threads=1), packed, length=LENGTH, tokens=LENGTH).logits(IDS)
