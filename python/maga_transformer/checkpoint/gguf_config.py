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
    "rope_theta": "rope.freq_base",
}
_YARN_KEYS = {
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}


class _Keys:
    """The metadata of one architecture, by the part of the key after its prefix."""

    def __init__(self, path: str, metadata: dict[str, Any]) -> None:
        self.path = path
        self.architecture = metadata["general.architecture"]
        self._metadata = metadata

    def number(self, key: str) -> int | float | None:
        """None where the file has no such key."""
        full = f"{self.architecture}.{key}"
        value = self._metadata.get(full)
        if isinstance(value, list):
            raise ValueError(f"{self.path}: {full} differs between layers, which is not supported")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"{self.path}: {full} is {value!r}, expected a number")
        return value

    def numbers(self, keys: dict[str, str]) -> dict[str, int | float]:
        """`keys` maps names of ours to theirs; absent ones are left out."""
        found = {ours: self.number(theirs) for ours, theirs in keys.items()}
        return {ours: value for ours, value in found.items() if value is not None}

    def count(self, key: str, default: int | None = None) -> int:
        value = self.number(key)
        value = default if value is None else value
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{self.path}: {self.architecture}.{key} is {value!r}, expected an integer from 1")
        return value

    def text(self, key: str) -> str | None:
        value = self._metadata.get(f"{self.architecture}.{key}")
        return None if value is None else str(value)


def hugging_face_config(
    path: str, metadata: dict[str, Any], shapes: dict[str, tuple[int, ...]], tables: dict[str, npt.NDArray[Any]]
) -> dict[str, Any]:
    """`shapes` are the model's tensors by Hugging Face name, `tables` the stored rope tables."""
    keys = _Keys(path, metadata)
    if keys.architecture not in ARCHITECTURES:
        return {"architectures": [keys.architecture], "model_type": keys.architecture}
    name, model_type = ARCHITECTURES[keys.architecture]
    if keys.number("expert_count"):
        name, model_type = "MixtralForCausalLM", "mixtral"
    elif keys.architecture == "llama" and keys.number("attention.sliding_window"):
        name, model_type = "MistralForCausalLM", "mistral"
    config: dict[str, Any] = {"architectures": [name], "model_type": model_type, "hidden_act": "silu", **keys.numbers(_KEYS)}
    heads = keys.count("attention.head_count")
    config["num_key_value_heads"] = keys.count("attention.head_count_kv", heads)
    if "model.embed_tokens.weight" in shapes:
        config["vocab_size"] = shapes["model.embed_tokens.weight"][0]
    config["tie_word_embeddings"] = "lm_head.weight" not in shapes
    config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in shapes
    config["mlp_bias"] = "model.layers.0.mlp.gate_proj.bias" in shapes
    rotary, head_dim = keys.number("rope.dimension_count"), keys.number("attention.key_length")
    head_dim = head_dim or keys.count("embedding_length") // heads
    if rotary is not None and rotary != head_dim:
        config["partial_rotary_factor"] = rotary / max(head_dim, 1)
    scaling = _rope_scaling(keys, tables)
    if scaling:
        config["rope_scaling"] = scaling
    return config


def _rope_scaling(keys: _Keys, tables: dict[str, npt.NDArray[Any]]) -> dict[str, Any]:
    if "rope_freqs.weight" in tables:  # llama3 scaling, already worked out by the converter
        return {"rope_type": "divisors", "divisors": tables["rope_freqs.weight"].astype(float).tolist()}
    kind = keys.text("rope.scaling.type")
    if kind is None:  # files from before that key
        factor = keys.number("rope.scale_linear")
        return {"rope_type": "linear", "factor": factor} if factor not in (None, 1) else {}
    factor = keys.number("rope.scaling.factor")
    if kind == "none" or (kind == "linear" and factor in (None, 1)):
        return {}
    if kind not in ("linear", "yarn") or keys.number("rope.scaling.attn_factor") not in (None, 1):
        raise ValueError(
            f"{keys.path}: rope scaling type {kind!r}, with attn_factor {keys.number('rope.scaling.attn_factor')}, "
            "is not supported (supported: none, linear and yarn without it)"
        )
    return {"rope_type": kind, "factor": factor, **(keys.numbers(_YARN_KEYS) if kind == "yarn" else {})}
