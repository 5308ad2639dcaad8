"""Mixtures of experts through GGUF: what transformers saved, expert by expert, comes back from the stacked tensors."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from checkpoints import write_gguf
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.models import families
from runner import Runner
from safetensors.numpy import load_file

IDS = np.random.default_rng(1).integers(0, 96, 40).tolist()
Q = gguf.GGMLQuantizationType
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "num_experts_per_tok": 2,
}
MOE = {"moe_intermediate_size": 32, "num_experts": 4}
GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1}
SHARED = {"n_shared_experts": 2, "first_k_dense_replace": 1, "use_qk_norm": True, **GROUPS}
COPIED = ("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size", "norm_topk_prob")
# general.architecture -> transformers' name, its settings, and metadata
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Mixtral", {"num_local_experts": 4}, {}),
    "qwen2moe": (
        "Qwen2Moe",
        {**MOE, "shared_expert_intermediate_size": 64},
        {"expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 64},
    ),
    "qwen3moe": ("Qwen3Moe", {**MOE, "head_dim": 16, "norm_topk_prob": True}, {"expert_feed_forward_length": 32}),
    "olmoe": ("Olmoe", {"num_experts": 4}, {}),
    "glm4moe": (
        "Glm4Moe",
        {"moe_intermediate_size": 32, "head_dim": 16, "routed_scaling_factor": 1.5, **SHARED},
        {
            "expert_feed_forward_length": 32,
            "expert_shared_count": 2,
            "leading_dense_block_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.5,
            "expert_group_count": 2,
            "expert_group_used_count": 1,
            "rope.dimension_count": 8,
        },
    ),
}


def tiny(architecture: str, folder: Path) -> torch.nn.Module:
    name, settings, _ = CASES[architecture]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **settings)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for key, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.25 if "embed" in key or "head" in key else parameter.shape[-1] ** -0.5)
            elif "norm" in key:
                parameter.uniform_(0.5, 1.5)
            elif "bias" in key:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    return model


def write(architecture: str, saved: dict[str, np.ndarray], config: Any, path: Path, quantize: Any = None) -> Path:
    """As the converter does: experts stacked, the gate of the shared expert a vector, Mixtral's q and k permuted."""
    names = gguf.get_tensor_name_map(next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == architecture), 3)
    stacks: dict[str, list[np.ndarray]] = {}
    stored = {}

    def put(name: str, data: np.ndarray, kind: str) -> None:
        found = names.get_name(name)
        assert found, name
        gguf_type = quantize if quantize is not None and data.ndim > 1 and "gate_inp" not in found else Q.F32
        data = np.ascontiguousarray(data)
        stored[f"{found}.{kind}"] = (data if gguf_type == Q.F32 else gguf.quants.quantize(data, gguf_type), gguf_type)

    for name in sorted(saved):
        data = saved[name]
        base, _, kind = name.rpartition(".")
        parts = base.split(".")
        if "experts" in parts:
            stacks.setdefault(".".join([*parts[:-2], parts[-1]]), []).append(data)
            continue
        if kind == "e_score_correction_bias":
            base, kind = f"{base}.e_score_correction", "bias"
        if base.endswith("shared_expert_gate"):
            data = data[0]
        if architecture == "llama" and parts[-1] in ("q_proj", "k_proj"):
            heads = 4 if parts[-1] == "q_proj" else 2
            data = data.reshape(heads, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        put(base, data, kind)
    for name, experts in stacks.items():
        put(name, np.stack(experts), "weight")
    metadata = {
        "context_length": 256,
        "embedding_length": 64,
        "block_count": 3,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "expert_count": 4,
        "expert_used_count": 2,
        **({"attention.key_length": 16} if hasattr(config, "head_dim") else {}),
        **CASES[architecture][2],
    }
    return write_gguf(path, {f"{architecture}.{key}": value for key, value in metadata.items()}, stored, architecture=architecture)


@pytest.mark.parametrize("architecture", CASES)
def test_experts(architecture: str, tmp_path: Path) -> None:
    model = tiny(architecture, tmp_path / "folder")
    saved = load_file(tmp_path / "folder" / "model.safetensors")
    checkpoint = open_checkpoint(str(write(architecture, saved, model.config, tmp_path / "m.gguf")))
    assert set(checkpoint.names()) == set(saved)
    for name, values in saved.items():
        assert checkpoint.shape(name) == values.shape and checkpoint.nbytes(name) == values.nbytes, name
        np.testing.assert_array_equal(checkpoint.tensor(name), values, err_msg=name)
    packed = open_checkpoint(str(write(architecture, saved, model.config, tmp_path / "q.gguf", Q.Q8_0)))
    assert packed.dtype(next(name for name in packed.names() if "experts.3." in name)) == "q8_0"
    config = checkpoint.config
    assert config["architectures"] == model.config.architectures == [f"{CASES[architecture][0]}ForCausalLM"]
    for key in COPIED:
        if key in CASES[architecture][1] or key == "num_experts_per_tok":
            assert config[key] == getattr(model.config, key), key
    if config["architectures"][0] not in families():
        return
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    assert np.abs(expected).max() > 0.5
    runner = Runner(_core.reference_backend(), checkpoint, length=len(IDS), tokens=len(IDS))
    np.testing.assert_allclose(runner.logits(IDS), expected, rtol=0, atol=1e-4)


def test_layers_that_only_draft_are_left_out(tmp_path: Path) -> None:
    model = tiny("glm4moe", tmp_path / "folder")
    saved = load_file(tmp_path / "folder" / "model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        name, settings, metadata = CASES["glm4moe"]
        patch.setitem(CASES, "glm4moe", (name, settings, {**metadata, "nextn_predict_layers": 1}))
        checkpoint = open_checkpoint(str(write("glm4moe", saved, model.config, tmp_path / "m.gguf")))
    assert checkpoint.config["num_hidden_layers"] == 2
    assert not any(name.startswith("model.layers.2.") for name in checkpoint.names())
