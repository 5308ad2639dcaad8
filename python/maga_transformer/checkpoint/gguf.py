"""GGUF models under Hugging Face's names: keys, tensor names and row order are translated, the values stay as stored."""

import os
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from maga_transformer.checkpoint.gguf_config import ARCHITECTURES, INTERLEAVED_ROPE, hugging_face_config
from maga_transformer.checkpoint.gguf_file import GgufFile, GgufTensor

_TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Computed from the metadata by whoever wrote the file; hugging_face_config reads rope_freqs itself.
_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class GgufCheckpoint:
    """One GGUF model: a file, or the first of its splits (model-00001-of-00003.gguf) and the others beside it."""

    def __init__(self, path: str) -> None:
        self.path = path
        first = GgufFile(path)
        self.metadata = first.metadata
        self._tensors: dict[str, tuple[GgufFile, str]] = {}  # our name -> (file, its name there)
        architecture = self.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise ValueError(f"{path}: general.architecture is missing")
        translate = architecture in ARCHITECTURES
        tables: dict[str, npt.NDArray[Any]] = {}
        for file in (first, *_other_splits(first)):
            for stored in file.tensors:
                if stored in _TABLES:
                    tables[stored] = file.tensor(stored)
                    continue
                name = _hugging_face_name(stored) if translate else stored
                if name in self._tensors:
                    raise ValueError(f"{file.path}: tensor {stored} is also in {self._tensors[name][0].path}")
                self._tensors[name] = (file, stored)
        shapes = {name: file.tensors[stored].shape for name, (file, stored) in self._tensors.items()}
        self.config = hugging_face_config(path, self.metadata, shapes, tables)
        self._interleaved = architecture in INTERLEAVED_ROPE

    def _stored(self, name: str) -> tuple[GgufFile, str, GgufTensor]:
        if name not in self._tensors:
            raise ValueError(f"{self.path}: no tensor {name}")
        file, stored = self._tensors[name]
        return file, stored, file.tensors[stored]

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored(name)[2].shape

    def dtype(self, name: str) -> str:
        return self._stored(name)[2].dtype

    def nbytes(self, name: str) -> int:
        return self._stored(name)[2].nbytes

    def file(self, name: str) -> str:
        return self._stored(name)[0].path

    def tensor(self, name: str) -> npt.NDArray[Any]:
        file, stored, _ = self._stored(name)
        values = file.tensor(stored)
        for projection, heads in ((".attn_q.", "num_attention_heads"), (".attn_k.", "num_key_value_heads")):
            if self._interleaved and projection in stored:
                return _halves_from_pairs(values, self.config[heads])
        return values

    def close(self) -> None:
        self._tensors.clear()


def _hugging_face_name(stored: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; unknown names stay, so that they are reported as found."""
    base, _, kind = stored.rpartition(".")
    if base in _TENSOR_NAMES:
        return f"{_TENSOR_NAMES[base]}.{kind}"
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", base)
    if layer and layer[2] in _LAYER_TENSOR_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_TENSOR_NAMES[layer[2]]}.{kind}"
    return stored


def _halves_from_pairs(values: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Rows of each head from the order that rotates (2j, 2j + 1) to the one that rotates (j, j + d/2)."""
    rows = values.shape[0]
    if rows % (2 * heads):
        return values  # a shape that the program builder refuses by name
    order = np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)
    reordered: npt.NDArray[Any] = values[order]
    return reordered


def _other_splits(first: GgufFile) -> list[GgufFile]:
    count = first.metadata.get("split.count", 0)
    if not isinstance(count, int) or count <= 1:
        return []
    match = _SPLIT.fullmatch(os.path.basename(first.path))
    if match is None or int(match[3]) != count or first.metadata.get("split.no", 0) != 0:
        raise ValueError(f"{first.path}: is one of {count} splits; give the first, named ...-00001-of-{count:05d}.gguf")
    paths = [
        os.path.join(os.path.dirname(first.path), f"{match[1]}-{index:05d}-of-{match[3]}.gguf") for index in range(2, count + 1)
    ]
    for path in paths:
        if not os.path.isfile(path):
            raise FileNotFoundError(f"{path}: this split of {first.path} is missing")
    return [GgufFile(path) for path in paths]
