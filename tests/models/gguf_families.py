"""Writes the models of tiny_families.py as llama.cpp's converter does: names by the gguf package's own tables, rows re-laid."""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from checkpoints import write_gguf
from safetensors.numpy import load_file

F32 = gguf.GGMLQuantizationType.F32
Arrays = dict[str, np.ndarray]
ARCHITECTURES = {name: architecture for architecture, name in gguf.MODEL_ARCH_NAMES.items()}

# Tiny model -> general.architecture
CASES = {
    "phi3": "phi3",
    "phi3-window": "phi3",
    "phi3-partial": "phi3",
    "phi3-longrope": "phi3",
    "phi3-longrope-beyond": "phi3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "glm": "chatglm",
    "glm4": "glm4",
    "chatglm": "chatglm",
    "cohere": "command-r",
    "cohere-qk-norm": "command-r",
    "cohere2": "cohere2",
    "gpt-neox": "gptneox",
    "gpt-neox-sequential": "gptneox",
    "phi": "phi2",
    "stablelm": "stablelm",
    "stablelm-parallel": "stablelm",
    "stablelm-qk-norm": "stablelm",
    "starcoder2": "starcoder2",
    "starcoder2-window": "starcoder2",
    "olmo": "olmo",
    "olmo2": "olmo2",
    "nemotron": "nemotron",
    "falcon-7b": "falcon",
    "falcon-40b": "falcon",
    "falcon-11b": "falcon",
    "bloom": "bloom",
    "mpt": "mpt",
    "mpt-clip": "mpt",
    "mpt-one-key": "mpt",
    "gpt2": "gpt2",
    "gpt-bigcode": "starcoder",
    "baichuan-7b": "baichuan",
    "baichuan2-7b": "baichuan",
    "baichuan-13b": "baichuan",
    "qwen": "qwen",
    "internlm2": "internlm2",
    "internlm2-bias": "internlm2",
    "xverse": "xverse",
}


class Keys:
    """config.json, whatever the family calls a thing."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def first(self, *names: str, default: Any = None) -> Any:
        return next((self.config[name] for name in names if self.config.get(name) is not None), default)

    @property
    def hidden(self) -> int:
        return self.first("hidden_size", "n_embd", "n_embed", "d_model")

    @property
    def heads(self) -> int:
        return self.first("num_attention_heads", "n_head", "n_heads")

    @property
    def layers(self) -> int:
        return self.first("num_hidden_layers", "n_layer", "n_layers", "num_layers")

    @property
    def kv_heads(self) -> int:
        if self.config.get("model_type") in ("gpt_bigcode", "falcon"):
            grouped = self.config.get("new_decoder_architecture")
            return self.config["num_kv_heads"] if grouped else 1
        attention = self.config.get("attn_config") or {}
        if attention.get("attn_type") == "multiquery_attention":
            return 1
        return self.first("num_key_value_heads", "multi_query_group_num", default=self.heads)

    @property
    def head_dim(self) -> int:
        return self.first("head_dim", "kv_channels", default=self.hidden // self.heads)


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """As the rotation of neighbours wants them: llama.cpp's documented permutation."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def transformed(name: str, data: np.ndarray, architecture: str, keys: Keys) -> Arrays:
    heads, kv_heads, d = keys.heads, keys.kv_heads, keys.head_dim
    base, _, kind = name.rpartition(".")
    rest = data.shape[1:]
    if architecture in ("bloom", "gptneox") and "query_key_value" in name:
        parts = data.reshape(heads, 3, d, *rest)
        return {name: np.concatenate([parts[:, i].reshape(-1, *rest) for i in range(3)])}
    if architecture == "falcon" and "query_key_value" in name:
        groups = data.reshape(kv_heads, heads // kv_heads + 2, d, *rest)
        parts = [groups[:, :-2], groups[:, [-2]], groups[:, [-1]]]
        return {name: np.concatenate([part.reshape(-1, *rest) for part in parts])}
    if architecture == "internlm2" and "wqkv" in name:
        groups = data.reshape(kv_heads, heads // kv_heads + 2, d, *rest)
        q, k, v = (part.reshape(-1, *rest) for part in (groups[:, :-2], groups[:, -2], groups[:, -1]))
        module = base.replace("attention.wqkv", "self_attn.{}_proj.") + kind
        return {module.format("q"): permuted(q, heads), module.format("k"): permuted(k, kv_heads), module.format("v"): v}
    if architecture == "baichuan" and "W_pack" in name:
        q, k, v = np.split(data, 3)
        module = base.replace("W_pack", "{}_proj.") + kind
        return {module.format("q"): permuted(q, heads), module.format("k"): permuted(k, heads), module.format("v"): v}
    if architecture in ("xverse", "olmo") and ("q_proj" in name or "k_proj" in name):
        return {name: permuted(data, heads if "q_proj" in name else kv_heads)}
    if architecture == "gpt2" and re.search(r"(c_attn|c_proj|c_fc)\.weight", name):
        return {name: data.T}
    if architecture.startswith("gemma") or architecture == "nemotron":
        return {name: data + 1 if name.endswith("norm.weight") else data}
    return {name: data}


def stacked_norms(tensors: Arrays) -> Arrays:
    """StableLM's, one tensor of all heads."""
    found: Arrays = {}
    for name in sorted(tensors, key=lambda name: [int(part) if part.isdigit() else part for part in name.split(".")]):
        match = re.fullmatch(r"(.*)\.norms\.\d+\.weight", name)
        key = f"{match[1]}.weight" if match else name
        found[key] = np.vstack([found[key], tensors[name]]) if key in found else tensors[name]
    return found


def write_family(case: str, folder: Path, path: Path, quantize: gguf.GGMLQuantizationType | None = None) -> Path:
    """`folder`: where tiny_families.py wrote the case."""
    architecture = CASES[case]
    config = json.loads((folder / "config.json").read_text())
    keys = Keys(config)
    tensors = load_file(folder / "model.safetensors")
    if architecture == "stablelm":
        tensors = stacked_norms(tensors)
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], keys.layers)
    stored: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] = {}
    for name, data in tensors.items():
        if architecture in ("bloom", "chatglm"):
            name = name.removeprefix("transformer.")
        for own, array in transformed(name, data, architecture, keys).items():
            found = names.get_name(own, try_suffixes=(".weight", ".bias"))
            assert found is not None, own
            kind = quantize if quantize is not None and array.ndim == 2 and "norm" not in own else F32
            array = np.ascontiguousarray(array, np.float32)
            stored[found] = (array if kind == F32 else gguf.quants.quantize(array, kind), kind)
    metadata = {f"{architecture}.{key}": value for key, value in family_metadata(architecture, keys, stored).items()}
    return write_gguf(path, metadata, stored, architecture=architecture)


def family_metadata(architecture: str, keys: Keys, stored: dict[str, Any]) -> dict[str, Any]:
    """Adds rope tables to `stored`."""
    first, hidden, heads = keys.first, keys.hidden, keys.heads
    kinds = gguf.Keys
    prefix = "{arch}."

    def key(name: str) -> str:
        return name.removeprefix(prefix)

    width = first("intermediate_size", "ffn_hidden_size", "n_inner", default=4 * hidden)
    if architecture == "mpt":
        width = int(first("expansion_ratio", default=4)) * hidden
    found: dict[str, Any] = {
        key(kinds.LLM.CONTEXT_LENGTH): first(
            "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length", default=2048
        ),
        key(kinds.LLM.EMBEDDING_LENGTH): hidden,
        key(kinds.LLM.BLOCK_COUNT): keys.layers,
        key(kinds.LLM.FEED_FORWARD_LENGTH): width,
        key(kinds.Attention.HEAD_COUNT): heads,
        key(kinds.Attention.HEAD_COUNT_KV): keys.kv_heads,
    }
    if keys.head_dim * heads != hidden or architecture.startswith("gemma"):
        found[key(kinds.Attention.KEY_LENGTH)] = keys.head_dim
    eps = first(
        "rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "layernorm_epsilon", "norm_eps", default=1e-5
    )
    rms = architecture not in ("bloom", "gptneox", "falcon", "gpt2", "starcoder", "starcoder2", "mpt", "phi2", "stablelm", "olmo")
    rms = rms and architecture not in ("command-r", "cohere2", "nemotron")
    found[key(kinds.Attention.LAYERNORM_RMS_EPS if rms else kinds.Attention.LAYERNORM_EPS)] = float(eps)
    rope = dict(first("rope_parameters", default={}))
    if "full_attention" in rope:
        found[key(kinds.Rope.FREQ_BASE_SWA)] = float(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    elif first("rope_local_base_freq"):
        found[key(kinds.Rope.FREQ_BASE_SWA)] = float(first("rope_local_base_freq"))
        rope = {**rope, **first("rope_scaling"), "rope_theta": first("rope_theta")}
    theta = rope.get("rope_theta") or first("rope_theta", "rotary_emb_base")
    if theta:
        found[key(kinds.Rope.FREQ_BASE)] = float(theta)
    partial = rope.get("partial_rotary_factor") or first("partial_rotary_factor", "rotary_pct", default=1.0)
    if architecture == "chatglm":
        partial = 0.5
    found[key(kinds.Rope.DIMENSION_COUNT)] = int(keys.head_dim * partial)
    if rope.get("rope_type") == "linear":
        found[key(kinds.Rope.SCALING_TYPE)] = "linear"
        found[key(kinds.Rope.SCALING_FACTOR)] = float(rope["factor"])
    if rope.get("rope_type") == "longrope":
        original = first("original_max_position_embeddings")
        scale = first("max_position_embeddings") / original
        found[key(kinds.Rope.SCALING_ORIG_CTX_LEN)] = original
        found[key(kinds.Rope.SCALING_ATTN_FACTOR)] = float(np.sqrt(1 + np.log(scale) / np.log(original)))
        for name in ("long", "short"):
            stored[f"rope_factors_{name}.weight"] = (np.array(rope[f"{name}_factor"], np.float32), F32)
    for name, own in {
        "sliding_window": kinds.Attention.SLIDING_WINDOW,
        "attn_logit_softcapping": kinds.LLM.ATTN_LOGIT_SOFTCAPPING,
        "final_logit_softcapping": kinds.LLM.FINAL_LOGIT_SOFTCAPPING,
        "logit_scale": kinds.LLM.LOGIT_SCALE,
        "clip_qkv": kinds.Attention.CLAMP_KQV,
        "use_parallel_residual": kinds.LLM.USE_PARALLEL_RESIDUAL,
    }.items():
        if first(name) is not None:
            value = first(name)
            found[key(own)] = value if isinstance(value, bool) or name == "sliding_window" else float(value)
    if architecture == "stablelm":
        found[key(kinds.LLM.USE_PARALLEL_RESIDUAL)] = True  # the converter's default, whatever the model is
    if architecture == "mpt":
        attention = first("attn_config", default={})
        if attention.get("alibi", True):
            found[key(kinds.Attention.MAX_ALIBI_BIAS)] = float(attention.get("alibi_bias_max", 8))
        if attention.get("clip_qkv"):
            found[key(kinds.Attention.CLAMP_KQV)] = float(attention["clip_qkv"])
    types = first("layer_types")
    if architecture in ("gemma2", "gemma3", "cohere2") and types:
        found[key(kinds.Attention.SLIDING_WINDOW_PATTERN)] = [kind == "sliding_attention" for kind in types]
    return found
