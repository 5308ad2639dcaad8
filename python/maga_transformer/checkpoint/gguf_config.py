"""GGUF metadata as the keys of Hugging Face's config.json, so that a model family reads one kind of config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from maga_transformer.checkpoint.gguf_layouts import LAYOUTS, Layout

ARCHITECTURES = tuple(LAYOUTS)

# config.json key -> metadata key after the architecture's prefix
_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
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

    def count_or_list(self, key: str, default: int | list[int] | None = None) -> int | list[int]:
        """A number above 0, or one from 0 for each layer, of which at least one is above."""
        full = f"{self.architecture}.{key}"
        value = self._metadata.get(full)
        value = default if value is None else value
        counts = value if isinstance(value, list) else [value]
        if isinstance(value, list) and len(value) != self.number("block_count"):
            raise ValueError(f"{self.path}: {full} has {len(value)} items, block_count is {self.number('block_count')}")
        if value is not default and any(not isinstance(item, int) or isinstance(item, bool) or item < 0 for item in counts):
            raise ValueError(f"{self.path}: {full} is {value!r}, expected an integer from 1, or a list of them")
        if value is None or (value is not default and max(counts, default=0) < 1):
            raise ValueError(f"{self.path}: {full} is {value!r}, expected an integer from 1")
        return value

    def values(self, keys: Mapping[str, str]) -> dict[str, Any]:
        """As `numbers`, of values of any type."""
        found = {ours: self._metadata.get(f"{self.architecture}.{theirs}") for ours, theirs in keys.items()}
        return {ours: value for ours, value in found.items() if value is not None}

    def text(self, key: str) -> str | None:
        value = self._metadata.get(f"{self.architecture}.{key}")
        return None if value is None else str(value)


@dataclass(frozen=True)
class HeadSizes:
    """Of each layer: one number for all, or a list."""

    _heads: int | list[int]
    _kv_heads: int | list[int]
    layers: int | None = None  # of files that have layers behind the model's own, which only draft

    def heads(self, layer: int) -> int:
        return _of_layer(self._heads, layer)

    def kv_heads(self, layer: int) -> int:
        return _of_layer(self._kv_heads, layer)


def _of_layer(value: int | list[int], layer: int) -> int:
    return value if isinstance(value, int) else value[layer] if layer < len(value) else 0


def head_sizes(path: str, metadata: dict[str, Any]) -> HeadSizes:
    keys = _Keys(path, metadata)
    heads = keys.count_or_list("attention.head_count")
    drafts = keys.number("nextn_predict_layers")
    layers = keys.count("block_count") - keys.count("nextn_predict_layers") if drafts else None
    return HeadSizes(heads, keys.count_or_list("attention.head_count_kv", heads), layers)


def hugging_face_config(
    path: str,
    metadata: dict[str, Any],
    layout: Layout,
    shapes: Mapping[str, tuple[int, ...]],
    tables: Mapping[str, npt.NDArray[Any]],
) -> dict[str, Any]:
    """`shapes` are the model's tensors by Hugging Face name, `tables` the stored rope tables."""
    keys = _Keys(path, metadata)
    architecture, model_type = layout.architecture, layout.model_type
    if keys.number("expert_count") and layout.architecture == "LlamaForCausalLM":
        raise ValueError(f"{path}: {keys.architecture}.expert_count is there, but not blk.0.ffn_gate_inp.weight")
    if layout.architecture == "LlamaForCausalLM" and keys.number("attention.sliding_window"):
        architecture, model_type = "MistralForCausalLM", "mistral"
    config: dict[str, Any] = {"architectures": [architecture], "model_type": model_type, "hidden_act": "silu", **layout.config}
    config |= keys.numbers(_KEYS)
    config |= keys.values(layout.keys)
    for eps in ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"):
        if (value := keys.number(eps)) is not None:
            config[layout.eps] = value
    heads = keys.count_or_list("attention.head_count")
    sizes = {
        "layer_head_num": heads,
        "num_key_value_heads_per_layer": keys.count_or_list("attention.head_count_kv", heads),
        "layer_inter_size": keys.count_or_list("feed_forward_length", 0),
    }
    config |= {key: value for key, value in sizes.items() if isinstance(value, list)}  # of models whose layers differ
    heads, kv_heads, width = (_most(value) for value in sizes.values())
    config["num_attention_heads"] = heads
    config["num_key_value_heads"] = kv_heads if heads % kv_heads == 0 else heads
    if width:
        config["intermediate_size"] = width
    embedding = f"{layout.outside['token_embd']}.weight"
    if embedding in shapes:
        config["vocab_size"] = shapes[embedding][0]
    config["tie_word_embeddings"] = f"{layout.outside.get('output')}.weight" not in shapes
    config |= {key: tensor in shapes for key, tensor in layout.flags.items()}
    rotary = keys.number("rope.dimension_count")
    config["head_dim"] = head_dim = keys.count("attention.key_length", max(1, keys.count("embedding_length") // heads))
    if rotary is not None:
        config["partial_rotary_factor"] = math.nextafter(rotary / head_dim, math.inf)  # so that the product is not rounded down
    pooling = keys.number("pooling_type")
    if isinstance(pooling, int) and pooling in _POOLINGS:
        config["gguf_pooling"] = _POOLINGS[pooling]
    scaling = _rope_scaling(keys, tables)
    if scaling:
        config["rope_scaling"] = scaling
    _finish(keys, config, shapes)
    return config


def _finish(keys: _Keys, config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """What single architectures say in their own way, or not at all."""
    architecture, heads = keys.architecture, config["num_attention_heads"]
    pattern = keys.values({"pattern": "attention.sliding_window_pattern"}).get("pattern")
    if isinstance(pattern, list):
        config["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    elif pattern is not None:
        config["sliding_window_pattern"] = pattern
    if architecture == "baichuan" and keys.number("block_count") == _BAICHUAN_13B_LAYERS:
        config["model_max_length"] = config.pop("max_position_embeddings", 4096)
    elif architecture == "falcon":
        config["new_decoder_architecture"] = config["num_key_value_heads"] > 1
        config["num_kv_heads"] = config["num_key_value_heads"]
        config["num_ln_in_parallel_attn"] = 2 if "transformer.h.0.ln_mlp.weight" in shapes else 1
        config["bias"] = "transformer.h.0.mlp.dense_h_to_4h.bias" in shapes
    elif architecture == "stablelm":  # its key is true for models that are not
        config["use_parallel_residual"] = "model.layers.0.post_attention_layernorm.weight" not in shapes
    elif architecture == "chatglm":
        config["multi_query_group_num"] = config["num_key_value_heads"]
    elif architecture == "mpt":
        bias_max, clip = keys.number("attention.max_alibi_bias") or 0, keys.number("attention.clamp_kqv")
        grouped = {"attn_type": "grouped_query_attention", "kv_n_heads": config["num_key_value_heads"]}
        config["attn_config"] = {
            "alibi": bool(bias_max),
            "qk_ln": "transformer.blocks.0.attn.q_ln.weight" in shapes,
            **({"alibi_bias_max": bias_max} if bias_max else {}),
            **({"clip_qkv": clip} if clip else {}),
            **(grouped if config["num_key_value_heads"] != heads else {}),
        }
        config["no_bias"] = "transformer.blocks.0.norm_1.bias" not in shapes
        config["learned_pos_emb"] = "transformer.wpe.weight" in shapes
        if config.get("intermediate_size"):
            config["expansion_ratio"] = config["intermediate_size"] // config["hidden_size"]
    elif architecture == "gpt-oss":
        config["intermediate_size"] = keys.count("expert_feed_forward_length")
        config["rope_scaling"] |= {"truncate": False} if "rope_scaling" in config else {}
    elif architecture == "deepseek2":
        _deepseek(keys, config)
    elif architecture == "bert":
        _bert(keys, config, shapes)
    elif architecture == "nomic-bert":
        types = shapes.get("embeddings.token_type_embeddings.weight", (0,))
        config["type_vocab_size"] = types[0]
    elif architecture in _GEMMA_27B_LAYERS:
        wide = keys.number("block_count") == _GEMMA_27B_LAYERS[architecture]
        config["query_pre_attn_scalar"] = config["hidden_size"] // heads if wide else config["head_dim"]


def _deepseek(keys: _Keys, config: dict[str, Any]) -> None:
    """Sizes of heads before their keys are absorbed; older files have no others."""
    key, value = (keys.count(f"attention.{kind}_length_mla", keys.count(f"attention.{kind}_length")) for kind in ("key", "value"))
    rotary = keys.count("rope.dimension_count")
    config |= {"qk_nope_head_dim": key - rotary, "v_head_dim": value}
    del config["head_dim"], config["partial_rotary_factor"]
    if keys.number("expert_gating_func") == _SIGMOID:
        config |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
        config |= {name: config.get(name, 1) for name in ("n_group", "topk_group")}
    elif config.get("n_group", 1) > 1:
        config["topk_method"] = "group_limited_greedy"
    scale = keys.number("rope.scaling.yarn_log_multiplier")
    if scale and config.get("rope_scaling"):  # of scores; the file's writer takes it for granted that cosines stay as they are
        config["rope_scaling"] |= {"mscale": 10 * scale, "mscale_all_dim": 10 * scale}


def _bert(keys: _Keys, config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """RoBERTa and XLM-R too: the converter cut off the rows of positions that they do not use, and what it calls cls and cls.output
    are then the layers of their classifier, which compute as BERT's pooler and classifier do."""
    embeddings = "bert.embeddings"
    for key, tensor in (
        ("max_position_embeddings", f"{embeddings}.position_embeddings.weight"),  # files exist whose key counts the cut ones
        ("type_vocab_size", f"{embeddings}.token_type_embeddings.weight"),
        ("num_labels", "classifier.weight"),
    ):
        if tensor in shapes:
            config[key] = shapes[tensor][0]
    if "classifier.weight" in shapes:
        config["architectures"] = ["BertForSequenceClassification"]


_POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}  # pooling_type; 0 leaves it to whoever runs the model, 4 is a classifier's
_SIGMOID = 2  # expert_gating_func

# Sizes by which llama.cpp itself tells these models apart: no key does.
_BAICHUAN_13B_LAYERS = 40
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}


def _most(value: int | list[int]) -> int:
    return value if isinstance(value, int) else max(value)


def _rope_scaling(keys: _Keys, tables: Mapping[str, npt.NDArray[Any]]) -> dict[str, Any]:
    if "rope_freqs.weight" in tables:  # llama3 scaling, already worked out by the converter
        return {"rope_type": "divisors", "divisors": tables["rope_freqs.weight"].astype(float).tolist()}
    if "rope_factors_long.weight" in tables:
        return _longrope(keys, tables)
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


def _longrope(keys: _Keys, tables: Mapping[str, npt.NDArray[Any]]) -> dict[str, Any]:
    if "rope_factors_short.weight" not in tables:
        raise ValueError(f"{keys.path}: rope_factors_long.weight is there, but not rope_factors_short.weight")
    factors = {f"{kind}_factor": tables[f"rope_factors_{kind}.weight"].astype(float).tolist() for kind in ("short", "long")}
    scaling = {"rope_type": "longrope", **factors}
    names = {
        "original_max_position_embeddings": "rope.scaling.original_context_length",
        "attention_factor": "rope.scaling.attn_factor",
    }
    return {**scaling, **keys.numbers(names)}
