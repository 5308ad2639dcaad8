"""Pruned models: layers that differ in heads and MLP width, or lack attention or MLP. The sizes come from the tensors' shapes;
config keys (RTP-LLM's layer_head_num and layer_inter_size, DeciLM's num_key_value_heads_per_layer) are checked against them."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from maga_transformer._core import View
from maga_transformer.checkpoint import Checkpoint, DummyCheckpoint
from maga_transformer.models.builder import Builder, Heads, Norm
from maga_transformer.models.config import ModelConfig
from maga_transformer.models.rope import Rope

log = logging.getLogger(__name__)

ABSENT = View(-1, 0, 0)  # what a sublayer that is not there gives; added to a residual, it changes nothing

_HEADS = ("layer_head_num", "head_num")
_KV_HEADS = ("num_key_value_heads_per_layer", "layer_head_num_kv")
_WIDTHS = ("layer_inter_size", "inter_size")
SPARSE_KEYS = (*_HEADS, *_KV_HEADS, *_WIDTHS, "layer_num")


@dataclass(frozen=True)
class LayerTensors:
    """The linears whose shapes tell the sizes of a layer; "{}" stands for its number, and other names may stand in front."""

    output: str = "model.layers.{}.self_attn.o_proj"
    keys: str = "model.layers.{}.self_attn.k_proj"
    fused: str = ""  # q, k and v in one tensor
    down: str = "model.layers.{}.mlp.down_proj"
    value_dim: str = ""  # config key of a head's columns in `output`, where all heads share one key that no linear here shows


@dataclass(frozen=True)
class LayerSize:
    heads: Heads
    intermediate: int | None

    @property
    def lacks_something(self) -> bool:
        return self.heads.heads == 0 or self.intermediate == 0


def layer_sizes(
    checkpoint: Checkpoint, config: ModelConfig, usual: LayerSize, layers: int, tensors: LayerTensors, *, transposed: bool
) -> dict[int, LayerSize]:
    """Of the layers, by number, where they differ; empty for a regular model."""
    heads, kv_heads, widths = (_counts(config, keys, layers) for keys in (_HEADS, _KV_HEADS, _WIDTHS))
    head_columns = config.integer(tensors.value_dim) if tensors.value_dim else usual.heads.head_dim
    found = _from_shapes(checkpoint, usual, layers, tensors, transposed, head_columns)
    told = heads is not None or kv_heads is not None or widths is not None or config.get("block_configs") is not None
    if not told and len(set(found.values())) < 2:
        return {}
    for i in range(min(layers, len(heads or kv_heads or widths or []))):
        size = found.get(i)
        if size is None:  # no tensors to look at
            size = _as_told(usual, i, heads, kv_heads, widths)
        # Without heads, or with one key for all, what is said of their keys means nothing.
        shared = size.heads.kv_heads if size.heads.heads and not tensors.value_dim else None
        compared = ((heads, _HEADS, size.heads.heads), (kv_heads, _KV_HEADS, shared), (widths, _WIDTHS, size.intermediate))
        for counts, keys, count in compared:
            if counts is not None and count is not None and counts[i] != count:
                mixes = not any(name.endswith(f"{tensors.down.format(i)}.weight") for name in checkpoint.names())
                if counts is widths and counts[i] == 0 and mixes:
                    continue  # its experts have a width of their own
                key = next(key for key in keys if config.get(key) is not None)
                raise ValueError(f"{config.path}: config key {key} says {counts[i]} for layer {i}, whose tensors have {count}")
        found[i] = size
    for i, size in found.items():
        if size.heads.heads and (size.heads.kv_heads == 0 or size.heads.heads % size.heads.kv_heads):
            raise ValueError(f"{config.path}: layer {i} has {size.heads.heads} heads and {size.heads.kv_heads} KV heads")
    log.info("%s: layers differ in heads or MLP width, as their tensors do", config.path)
    return found


def _counts(config: ModelConfig, keys: Sequence[str], layers: int) -> list[int] | None:
    for key in keys:
        value = config.get(key)
        if isinstance(value, list):
            if len(value) != layers or any(not isinstance(n, int) or isinstance(n, bool) or not 0 <= n < 1 << 40 for n in value):
                raise config.error(key, value, f"a list of {layers} integers from 0")
            return value
    return None


def _as_told(usual: LayerSize, i: int, heads: list[int] | None, kv_heads: list[int] | None, widths: list[int] | None) -> LayerSize:
    """Of a layer whose tensors are not at hand; KV heads are as many as heads, unless heads share them usually."""
    count = usual.heads.heads if heads is None else heads[i]
    shared = usual.heads.kv_heads if usual.heads.kv_heads != usual.heads.heads else count
    kv_count = min(shared, count) if kv_heads is None else kv_heads[i]
    return LayerSize(replace(usual.heads, heads=count, kv_heads=kv_count), usual.intermediate if widths is None else widths[i])


def _from_shapes(
    checkpoint: Checkpoint, usual: LayerSize, layers: int, tensors: LayerTensors, transposed: bool, head_columns: int
) -> dict[int, LayerSize]:
    """Of all layers up to the last that has a tensor. Sizes that a tensor does not show are the usual ones."""
    names = checkpoint.names()
    parents = {name[: match.start()] for name in names for match in re.finditer(r"\.", name)}
    templates = (tensors.output, tensors.keys, tensors.fused, tensors.down)
    output, keys, fused, down = (_Linears(checkpoint, template, transposed) for template in templates)
    d, found = usual.heads.head_dim, {}
    last = max([*output.shapes, *down.shapes], default=-1)
    while last + 1 < layers and (output.exists(last + 1, parents) or down.exists(last + 1, parents)):  # under names of other kinds
        last += 1
    for i in range(min(layers, last + 1)):
        heads, kv_heads, width = usual.heads.heads, usual.heads.kv_heads, usual.intermediate
        if i in output.shapes:
            columns, shared = output.shapes[i][1], kv_heads * d if tensors.value_dim else 0
            if i in keys.shapes:
                shared = keys.shapes[i][0]
            elif i in fused.shapes:
                shared = (fused.shapes[i][0] - columns) // 2
            if columns % head_columns == 0 and shared % d == 0 and shared >= 0:  # else a shape that the builder refuses by name
                heads, kv_heads = columns // head_columns, shared // d
        elif output.are_gone(i, parents):
            heads = kv_heads = 0
        if i in down.shapes:
            width = down.shapes[i][1]
        elif down.are_gone(i, parents):
            width = 0
        found[i] = LayerSize(replace(usual.heads, heads=heads, kv_heads=kv_heads), width)
    return found


class _Linears:
    """The matrices that a template names."""

    def __init__(self, checkpoint: Checkpoint, template: str, transposed: bool) -> None:
        self.shapes: dict[int, tuple[int, int]] = {}  # (out, in), by layer
        self._template = ""  # with what stands in front
        if not template:
            return
        pattern = re.compile(r"(.+\.)?" + re.escape(template).replace(r"\{\}", r"(\d+)") + r"\.weight")
        for name in checkpoint.names():
            if match := pattern.fullmatch(name):
                shape = checkpoint.shape(name)
                if len(shape) == 2:
                    self.shapes[int(match[2])] = (shape[1], shape[0]) if transposed else (shape[0], shape[1])
                    self._template = (match[1] or "") + template

    def are_gone(self, i: int, parents: set[str]) -> bool:
        """Whether layer `i` has no tensor of the sublayer at all, while others do; a mixture of experts has other names."""
        whole_layer = self._sublayer.endswith("{}")  # its linears belong to the layer itself
        return bool(self.shapes) and i not in self.shapes and (whole_layer or not self.exists(i, parents))

    def exists(self, i: int, parents: set[str]) -> bool:
        """Whether layer `i` has any tensor of the sublayer."""
        return self._sublayer.format(i) in parents

    @property
    def _sublayer(self) -> str:
        return self._template.rpartition(".")[0]


class PrunedBuilder(Builder):
    """Of models with layers that lack attention or MLP: ABSENT goes in and comes out, and no op is appended for it."""

    def norm(self, x: View, module: str, norm: Norm) -> View:
        known = self.has(f"{module}.weight") or not norm.weight or isinstance(self._checkpoint, DummyCheckpoint)
        if x.width and known:
            return super().norm(x, module, norm)
        self._ignore_norm(module)
        return ABSENT  # a norm that is missing goes with what would read it

    def norm_in_place(self, x: View, module: str, norm: Norm, group: int) -> None:
        if x.width:
            super().norm_in_place(x, module, norm, group)
        else:
            self._ignore_norm(module)

    def _ignore_norm(self, module: str) -> None:
        """It may have been left in the file."""
        for kind in ("weight", "bias"):
            self.ignore(f"{module}.{kind}")

    def norm_heads(self, x: View, weights: str | Sequence[str], norm: Norm, head_dim: int) -> None:
        if x.width:
            super().norm_heads(x, weights, norm, head_dim)

    def linears(self, x: View, modules: Sequence[str], *, widths: Sequence[int | None], bias: bool = False) -> list[View]:
        if not x.width or not any(width is None or width > 0 for width in widths):
            return [ABSENT] * len(widths)
        return super().linears(x, modules, widths=widths, bias=bias)

    def split_linear(self, x: View, module: str, widths: Sequence[int], *, groups: int = 1, bias: bool = False) -> list[View]:
        if not x.width or not sum(widths):
            return [ABSENT] * len(widths)
        return super().split_linear(x, module, widths, groups=groups, bias=bias)

    def rope(self, views: Sequence[View], rope: Rope, head_dim: int, *, offset: int = 0) -> None:
        super().rope([view for view in views if view.width], rope, head_dim, offset=offset)

    def clamp(self, views: Sequence[View], limit: float) -> None:
        if views[0].width:
            super().clamp(views, limit)

    def attention(self, q: View, k: View, v: View | None, heads: Heads, **options: Any) -> View:
        return super().attention(q, k, v, heads, **options) if q.width else ABSENT

    def activate(self, gate: View, up: View | None, activation: str) -> View:
        return super().activate(gate, up, activation) if gate.width else ABSENT

    def add(self, a: View, b: View) -> View:
        return super().add(a, b) if a.width and b.width else a if a.width else b


def sparse_keys(values: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Those of a SPARSE_CONFIG_FILE that say how layers differ."""
    found = {key: values[key] for key in SPARSE_KEYS if key in values}
    if not any(isinstance(value, list) for value in found.values()):
        raise ValueError(f"{path}: none of the lists layer_head_num and layer_inter_size is here")
    return found
