"""GGUF metadata as the keys of Hugging Face's config.json, so that a model family reads one kind of config."""

from typing import Any

import numpy.typing as npt

# general.architecture -> (Hugging Face architecture, model_type); other architectures keep their own names and keys
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
# Architectures whose q and k rows are stored for the interleaved rotation.
INTERLEAVED_ROPE = ("llama",)

# config.json key -> metadata key after the architecture's prefix
_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
}
_YARN_KEYS = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}


def hugging_face_config(
    path: str, metadata: dict[str, Any], shapes: dict[str, tuple[int, ...]], tables: dict[str, npt.NDArray[Any]]
) -> dict[str, Any]:
    """`shapes` are the model's tensors by Hugging Face name, `tables` the stored rope tables."""
    architecture = metadata["general.architecture"]
    if architecture not in ARCHITECTURES:
        return {"architectures": [architecture], "model_type": architecture}

    def read(key: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.{key}", default)

    name, model_type = ARCHITECTURES[architecture]
    config: dict[str, Any] = {"architectures": [name], "model_type": model_type}
    for ours, theirs in _KEYS.items():
        value = read(theirs)
        if isinstance(value, list):
            raise ValueError(f"{path}: {architecture}.{theirs} differs between layers, which is not supported")
        if value is not None:
            config[ours] = value
    if read("expert_count", 0):
        config["architectures"], config["model_type"] = ["MixtralForCausalLM"], "mixtral"
    if architecture == "llama" and config.get("sliding_window"):
        config["architectures"], config["model_type"] = ["MistralForCausalLM"], "mistral"
    heads = config.get("num_attention_heads")
    if not isinstance(heads, int) or heads < 1:
        raise ValueError(f"{path}: {architecture}.attention.head_count is {heads!r}")
    kv_heads = config.setdefault("num_key_value_heads", heads)
    if not isinstance(kv_heads, int) or kv_heads < 1:
        raise ValueError(f"{path}: {architecture}.attention.head_count_kv is {kv_heads!r}")
    if "model.embed_tokens.weight" in shapes:
        config["vocab_size"] = shapes["model.embed_tokens.weight"][0]
    config["tie_word_embeddings"] = "lm_head.weight" not in shapes
    config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in shapes
    config["mlp_bias"] = "model.layers.0.mlp.gate_proj.bias" in shapes
    config["hidden_act"] = "silu"
    config["rope_theta"] = read("rope.freq_base", 10000.0)
    rotary = read("rope.dimension_count")
    head_dim = config.get("head_dim") or config.get("hidden_size", 0) // heads
    if rotary is not None and head_dim and rotary != head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    scaling = _rope_scaling(path, read, tables)
    if scaling:
        config["rope_scaling"] = scaling
    return config


def _rope_scaling(path: str, read: Any, tables: dict[str, npt.NDArray[Any]]) -> dict[str, Any]:
    kind = read("rope.scaling.type", "none")
    factor = read("rope.scaling.factor", read("rope.scale_linear", 1.0))
    if "rope_freqs.weight" in tables:  # llama3 scaling, already worked out by the converter
        return {"rope_type": "divisors", "divisors": tables["rope_freqs.weight"].astype(float).tolist()}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor}
        original = read("rope.scaling.original_context_length")
        if original:
            scaling["original_max_position_embeddings"] = original
        scaling.update({ours: read(theirs) for ours, theirs in _YARN_KEYS.items() if read(theirs) is not None})
        return scaling
    if kind == "linear" or (kind == "none" and factor != 1.0 and read("rope.scaling.type") is None):
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else {}
    if kind != "none":
        raise ValueError(f"{path}: rope scaling type {kind!r} is not supported (supported: none, linear, yarn)")
    return {}
