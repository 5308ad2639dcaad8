"""GGUF models under Hugging Face's names: keys, tensor names and row order are translated, the values stay as stored."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from maga_transformer.checkpoint.derived import Array, pairs_to_halves
from maga_transformer.checkpoint.files import release
from maga_transformer.checkpoint.gguf_config import HeadSizes, head_sizes, hugging_face_config
from maga_transformer.checkpoint.gguf_file import GgufFile, GgufTensor
from maga_transformer.checkpoint.gguf_layouts import Layout, layout_of

# Computed from the metadata by whoever wrote the file; hugging_face_config reads rope_freqs itself.
_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_MATRICES = ("token_types", "cls.output")  # that may have one row, whose size quantising a file leaves out
SCALED = "ggml_scaled"  # quant_method of models of which some weights are to be multiplied by their tensor weight_scale
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class _Part:
    """Rows of a stored tensor: all, in an order or range; one of them (an expert, of a stack); less what the converter added."""

    file: GgufFile
    stored: str
    rows: Array | slice | int | None = None
    offset: float = 0.0
    as_row: bool = False  # a vector, as a matrix of one row

    @property
    def whole(self) -> GgufTensor:
        return self.file.tensors[self.stored]

    @property
    def shape(self) -> tuple[int, ...]:
        if self.as_row:
            return (1, *self.whole.shape)
        rows, *rest = self.whole.shape
        if isinstance(self.rows, int):
            return tuple(rest)
        return (len(range(*self.rows.indices(rows))) if isinstance(self.rows, slice) else rows, *rest)

    def read(self) -> Array:
        values = self.file.tensor(self.stored)
        if self.as_row:
            return values[None]
        if self.rows is not None:
            values = values[self.rows]
        return values - values.dtype.type(self.offset) if self.offset else values

    def release(self) -> None:
        values = self.file.tensor(self.stored)
        release(values[self.rows] if isinstance(self.rows, int | slice) else values)


class GgufCheckpoint:
    """One GGUF model: a file, or the first of its splits (model-00001-of-00003.gguf) and the others beside it."""

    def __init__(self, path: str) -> None:
        self.path = path
        first = GgufFile(path)
        self.metadata = first.metadata
        self._parts: dict[str, _Part] = {}
        architecture = self.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise ValueError(f"{path}: general.architecture is missing")
        stored: dict[str, GgufFile] = {}
        for file in (first, *_other_splits(first)):
            for name in file.tensors:
                if name in stored:
                    raise ValueError(f"{file.path}: tensor {name} is also in {stored[name].path}")
                stored[name] = file
        tables = {name: stored.pop(name).tensor(name) for name in _TABLES if name in stored}
        layout = layout_of(architecture, set(stored))
        if layout is None:
            self.config: dict[str, Any] = {"architectures": [architecture], "model_type": architecture}
            self._parts = {name: _Part(file, name) for name, file in stored.items()}
            return
        sizes = head_sizes(path, self.metadata)
        for name, file in stored.items():
            layer = re.match(r"blk\.(\d+)\.", name)
            if layer and sizes.layers is not None and int(layer[1]) >= sizes.layers:
                continue
            weight, _, kind = name.rpartition(".")
            if kind in ("scale", "input_scale") and f"{weight}.weight" in stored:
                continue  # comes with its weight; or is of activations, which are rounded by scales of their own, if at all
            parts = _translate(layout, sizes, file, name)
            if f"{weight}.scale" in stored and kind == "weight":
                parts |= _scales(parts, stored[f"{weight}.scale"], f"{weight}.scale")
            for ours, part in parts.items():
                if ours in self._parts:
                    raise ValueError(f"{file.path}: tensor {name} stands for {ours}, which {self._parts[ours].stored} does too")
                self._parts[ours] = part
        shapes = {name: part.shape for name, part in self._parts.items()}
        self.config = hugging_face_config(path, self.metadata, layout, shapes, tables)
        if sizes.layers is not None:
            self.config["num_hidden_layers"] = sizes.layers
        if any(name.endswith(".weight_scale") for name in self._parts):
            self.config["quantization_config"] = {"quant_method": SCALED}

    def _part(self, name: str) -> _Part:
        if name not in self._parts:
            raise ValueError(f"{self.path}: no tensor {name}")
        return self._parts[name]

    def names(self) -> list[str]:
        return list(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._part(name).shape

    def dtype(self, name: str) -> str:
        return self._part(name).whole.dtype

    def nbytes(self, name: str) -> int:
        part = self._part(name)
        return part.whole.nbytes * math.prod(part.shape) // max(1, math.prod(part.whole.shape))

    def file(self, name: str) -> str:
        return self._part(name).file.path

    def tensor(self, name: str) -> Array:
        return self._part(name).read()

    def release(self, name: str) -> None:
        self._part(name).release()

    def close(self) -> None:
        self._parts.clear()


def _translate(layout: Layout, sizes: HeadSizes, file: GgufFile, stored: str) -> dict[str, _Part]:
    """The target's tensors that a stored one makes. Names that are not known stay, so that they are reported as found."""
    base, _, kind = stored.rpartition(".")
    tensor = file.tensors[stored]
    offset = layout.norm_offset if base.endswith("norm") and kind == "weight" else 0.0
    if offset and tensor.dtype not in ("fp32", "fp16"):
        raise ValueError(f"{file.path}: tensor {stored} has the type {tensor.dtype}, expected fp32")
    if base in layout.outside:
        as_row = base in _MATRICES and kind == "weight" and len(tensor.shape) == 1
        return {f"{layout.outside[base]}.{kind}": _Part(file, stored, offset=offset, as_row=as_row)}
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", base)
    if match is None or match[2] not in layout.modules:
        return {stored: _Part(file, stored)}
    index, module = int(match[1]), match[2]
    name = f"{layout.layer.format(index)}.{layout.modules[module]}"
    heads, kv_heads, rows = sizes.heads(index), sizes.kv_heads(index), tensor.shape[0]
    if layout.pairs and module in ("attn_q", "attn_k"):
        return {f"{name}.{kind}": _Part(file, stored, pairs_to_halves(rows, heads if module == "attn_q" else kv_heads))}
    if module == "attn_qkv" and layout.qkv:
        total = heads + 2 * kv_heads
        if not kv_heads or heads % kv_heads or rows % total:
            raise ValueError(
                f"{file.path}: tensor {stored} has {rows} rows, which do not fit {heads} heads and {kv_heads} KV heads"
            )
        q, k = heads * (rows // total), kv_heads * (rows // total)
        if layout.qkv == "apart":
            ranges = (slice(0, q), slice(q, q + k), slice(q + k, rows))
            return {f"{name.format(part)}.{kind}": _Part(file, stored, own) for part, own in zip("qkv", ranges, strict=True)}
        return {f"{name}.{kind}": _Part(file, stored, None if kv_heads == 1 else _interleaved(q, k, kv_heads))}
    if name.endswith(".norms"):  # of each head, a tensor
        return {f"{name}.{head}.{kind}": _Part(file, stored, head) for head in range(rows)}
    if module.endswith("_exps"):  # of each expert
        return {f"{name.format(expert)}.{kind}": _Part(file, stored, expert) for expert in range(rows)}
    if name.endswith(("_bias", ".sinks")):
        return {name: _Part(file, stored)}
    if module == "ffn_gate_inp_shexp" and len(tensor.shape) == 1:
        return {f"{name}.{kind}": _Part(file, stored, as_row=True)}
    return {f"{name}.{kind}": _Part(file, stored, offset=offset)}


def _scales(weights: dict[str, _Part], file: GgufFile, stored: str) -> dict[str, _Part]:
    """A factor for each of the weights that one stored tensor makes: the same one, or each expert's."""

    def own(rows: Array | slice | int | None) -> slice | None:
        return slice(rows, rows + 1) if isinstance(rows, int) else None

    return {f"{ours}_scale": _Part(file, stored, own(part.rows)) for ours, part in weights.items()}


def _interleaved(q: int, k: int, groups: int) -> Array:
    """The order of rows that makes q | k | v a run of each for every group."""
    rows = np.arange(q + 2 * k)
    return np.concatenate([part.reshape(groups, -1) for part in np.split(rows, [q, q + k])], axis=1).reshape(-1)


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
