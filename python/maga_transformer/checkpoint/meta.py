"""Models as Meta and Mistral publish them: params.json beside consolidated.*.pth, one file a model-parallel rank, or consolidated
safetensors. They are read under Llama's names, with the rows of q and k in the order that rotates halves."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from maga_transformer.checkpoint.derived import Array, DerivedCheckpoint, Shard, halves_from_pairs, joined, whole
from maga_transformer.checkpoint.files import read_json_object
from maga_transformer.checkpoint.folder import Entry
from maga_transformer.checkpoint.safetensors import SafetensorsFile
from maga_transformer.checkpoint.torch_folder import StateDict

PARAMS = "params.json"
_TENSORS = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
}
# Name in a layer -> Llama's, and the axis along which ranks hold it (None: all of it).
_LAYER_TENSORS: dict[str, tuple[str, int | None]] = {
    "attention_norm": ("input_layernorm", None),
    "attention.wq": ("self_attn.q_proj", 0),
    "attention.wk": ("self_attn.k_proj", 0),
    "attention.wv": ("self_attn.v_proj", 0),
    "attention.wo": ("self_attn.o_proj", 1),
    "ffn_norm": ("post_attention_layernorm", None),
    "feed_forward.w1": ("mlp.gate_proj", 0),
    "feed_forward.w3": ("mlp.up_proj", 0),
    "feed_forward.w2": ("mlp.down_proj", 1),
}
_BUFFER = re.compile(r"(.*\.)?rope\.freqs")


class _File(Protocol):
    path: str

    @property
    def entries(self) -> Mapping[str, Entry]: ...

    def tensor(self, name: str) -> Array: ...


def is_meta_folder(folder: Path) -> bool:
    return (folder / PARAMS).is_file() and any(folder.glob("consolidated*"))


def open_meta(path: str) -> DerivedCheckpoint:
    folder = Path(path)
    pickled = sorted(folder.glob("consolidated*.pth"))
    paths = pickled or sorted(folder.glob("consolidated*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{path}: {PARAMS} is here, but no consolidated.*.pth and no consolidated*.safetensors")
    opened: Callable[[str], _File] = StateDict if pickled else SafetensorsFile
    ranks = [opened(str(file)) for file in paths]
    params = _Params(os.path.join(path, PARAMS))
    names = list(ranks[0].entries)
    for rank in ranks:
        if set(rank.entries) != set(names):
            odd = sorted(set(rank.entries) ^ set(names))[0]
            raise ValueError(f"{rank.path}: tensor {odd} is in one of this file and {ranks[0].path} only")
    hidden, heads = params.count("dim"), params.count("n_heads")
    kv_heads = params.count("n_kv_heads", heads)
    tensors = {}
    for name in names:
        if _BUFFER.fullmatch(name):
            continue
        ours, axis = _place(name)
        shards = [_shard(rank, name) for rank in ranks]
        if ours == "model.embed_tokens.weight":  # cut by columns, and since Llama 3 by rows
            axis = 0 if shards[0].shape[-1] == hidden else 1
        take: Callable[[Array], Array] = whole
        if ".k_proj." in ours or ".v_proj." in ours:
            shards = shards[:: max(1, len(shards) // kv_heads)]  # more ranks than heads hold copies
        if ".q_proj." in ours or ".k_proj." in ours:
            take = partial(halves_from_pairs, heads=(heads if ".q_proj." in ours else kv_heads) // len(shards))
        tensors[ours] = joined(name, shards, axis, take)
    return DerivedCheckpoint(path, _config(params, {name: tensor.shape for name, tensor in tensors.items()}), tensors)


def _place(name: str) -> tuple[str, int | None]:
    """Llama's name of a tensor, and its axis; unknown names stay, so that they are reported as found."""
    base, _, kind = name.rpartition(".")
    if base in _TENSORS:
        return f"{_TENSORS[base]}.{kind}", None if base == "norm" else 0
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", base)
    if layer and layer[2] in _LAYER_TENSORS:
        ours, axis = _LAYER_TENSORS[layer[2]]
        return f"model.layers.{layer[1]}.{ours}.{kind}", axis
    return name, None


def _shard(file: _File, name: str) -> Shard:
    entry = file.entries[name]
    return Shard(entry.dtype, entry.shape, file.path, partial(file.tensor, name))


class _Params:
    def __init__(self, path: str) -> None:
        self.path = path
        self.values = read_json_object(path)

    def count(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{self.path}: {key} is {value!r}, expected an integer from 1")
        return value


def _config(params: _Params, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """As config.json would say it; widths come from the tensors, of which params.json tells only a recipe."""
    values = params.values
    if values.get("moe") is not None:
        raise ValueError(
            f"{params.path}: moe: mixtures of experts in this layout are not supported; convert the model to safetensors"
        )
    mistral = "sliding_window" in values or "hidden_dim" in values
    config: dict[str, Any] = {
        "architectures": ["MistralForCausalLM" if mistral else "LlamaForCausalLM"],
        "model_type": "mistral" if mistral else "llama",
        "hidden_act": "silu",
        "hidden_size": params.count("dim"),
        "num_hidden_layers": params.count("n_layers"),
        "num_attention_heads": params.count("n_heads"),
        "num_key_value_heads": params.count("n_kv_heads", params.count("n_heads")),
        "rms_norm_eps": values.get("norm_eps", 1e-5),
        "rope_theta": values.get("rope_theta", 10000.0),
        "tie_word_embeddings": bool(values.get("tied_embeddings", False)) or "lm_head.weight" not in shapes,
    }
    if values.get("head_dim") is not None:
        config["head_dim"] = values["head_dim"]
    if "model.embed_tokens.weight" in shapes:
        config["vocab_size"] = shapes["model.embed_tokens.weight"][0]
    if mistral:
        config["sliding_window"] = values.get("sliding_window")
        config["max_position_embeddings"] = values.get("max_position_embeddings", values.get("max_seq_len", 32768))
        if values.get("yarn") is not None:
            config["rope_scaling"] = _yarn(params)
    else:
        config["max_position_embeddings"] = _positions(values)
        if values.get("use_scaled_rope"):
            config["rope_scaling"] = {
                "rope_type": "llama3",
                "factor": values.get("rope_scaling_factor", 8.0),
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
    return config


def _positions(values: Mapping[str, Any]) -> Any:
    """The generation tells: no key does."""
    if values.get("max_seq_len") is not None:
        return values["max_seq_len"]
    if values.get("use_scaled_rope"):
        return 131072
    if values.get("rope_theta", 10000.0) >= 500000:
        return 8192
    return 2048 if values.get("norm_eps") == 1e-6 else 4096


def _yarn(params: _Params) -> dict[str, Any]:
    yarn = params.values["yarn"]
    if not isinstance(yarn, dict):
        raise ValueError(f"{params.path}: yarn is {yarn!r}, expected an object")
    if yarn.get("apply_scale") is False:
        yarn = {**yarn, "attention_factor": 1.0}
    names = {"beta": "beta_fast", "alpha": "beta_slow"}
    known = ("factor", "beta", "alpha", "original_max_position_embeddings", "attention_factor")
    return {"rope_type": "yarn", **{names.get(key, key): yarn[key] for key in known if yarn.get(key) is not None}}
