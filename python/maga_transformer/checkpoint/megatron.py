"""Megatron-LM checkpoints (https://github.com/NVIDIA/Megatron-LM), legacy and Core names, cut over ranks or distributed, read under
the names of Hugging Face's models: Llama, Qwen, Mixtral, GPT-2 and GPT-BigCode (learned positions), GPT-NeoX (rotary)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from maga_transformer.checkpoint.derived import Array, Derived, DerivedCheckpoint, Shard, joined, whole
from maga_transformer.checkpoint.megatron_config import BY_HEAD, NAMES, Sizes, config_and_sizes
from maga_transformer.checkpoint.megatron_files import RankFile, args_of, plain_name, rank_files, read_rank, with_all_experts
from maga_transformer.checkpoint.torch_dist import is_distributed, read_distributed
from maga_transformer.checkpoint.torch_file import TorchFile

# Role of a tensor -> what Megatron's versions, and programs built on it, call it.
_ROLES = {
    "embedding": ("embedding.word_embeddings.weight",),
    "positions": ("embedding.position_embeddings.weight",),
    "final_norm": ("final_layernorm", "final_norm"),
    "head": ("output_layer.weight", "lm_head.weight"),
}
_LAYER_ROLES = {
    "norm_1": ("input_layernorm", "input_norm", "self_attention.linear_qkv.layer_norm_"),
    "qkv": ("self_attention.query_key_value", "attention.query_key_value", "self_attention.linear_qkv"),
    "q_norm": ("self_attention.q_layernorm",),
    "k_norm": ("self_attention.k_layernorm",),
    "out": ("self_attention.dense", "attention.dense", "self_attention.linear_proj"),
    "norm_2": ("post_attention_layernorm", "post_attention_norm", "pre_mlp_layernorm", "mlp.linear_fc1.layer_norm_"),
    "gate": ("mlp.w2",),
    "up": ("mlp.w1", "mlp.dense_h_to_4h", "mlp.linear_fc1"),
    "down": ("mlp.dense_4h_to_h", "mlp.linear_fc2"),
    "router": ("mlp.router",),
    "shared_up": ("mlp.shared_experts.linear_fc1",),
    "shared_down": ("mlp.shared_experts.linear_fc2",),
    "shared_router": ("mlp.shared_experts.gate_weight",),
}
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.(weight|bias)")
# Copies and buffers.
_IGNORED = re.compile(r"(word_embeddings_for_head|rotary_pos_emb|.*rotary_emb|.*_extra_state).*")
_BY_COLUMNS, _BY_ROWS = 1, 0

Part = list[Shard]  # one tensor, of all tensor ranks


def open_megatron(path: str, folder: Path) -> DerivedCheckpoint:
    """`folder` holds mp_rank_* or a distributed checkpoint; config.json may lie there or in `path`, else the sizes are those that
    the files say."""
    stages = [[_distributed(folder)]] if is_distributed(folder) else _read_ranks(folder)
    parts = _merge_stages(stages)
    first = stages[0][0]
    core = any(".linear_qkv." in name for rank in stages[0] for name in rank.chunks[0])
    config, sizes = config_and_sizes(
        [Path(path) / "config.json", folder / "config.json"],
        first.path,
        first.args,
        {name: sum(shard.shape[0] for shard in part) for name, part in parts.items() if part[0].shape},
        core=core,
    )
    order = _QkvOrder(sizes, len(stages[0]), 2.0 if core else _version(first))
    tensors: dict[str, Derived] = {}

    def apart(name: str) -> bool:
        return ".up." in name and name.replace(".up.", ".gate.") in parts

    for name, part in parts.items():
        tensors.update(_translate(name, part, sizes, order, gated=not apart(name)))
    tensors.update(_vocabulary(parts, sizes))
    return DerivedCheckpoint(path, config, tensors)


def _read_ranks(folder: Path) -> list[list[RankFile]]:
    """[pipeline stage][tensor rank]"""
    return [[with_all_experts([read_rank(file) for file in experts]) for experts in ranks] for ranks in rank_files(folder)]


def _distributed(folder: Path) -> RankFile:
    """As the file of a single rank: its tensors are whole. Those of equal layers are stacked, and gate and up may be apart."""
    common = folder / "common.pt"
    content = TorchFile(str(common), inert=True).content if common.is_file() else {}
    found: dict[str, Shard] = {}
    for stored, tensor in read_distributed(folder).items():
        name = re.sub(r"\.linear_fc1\.(weight|bias)_w$", r".w2.\1", plain_name(stored))
        name = re.sub(r"\.linear_fc1\.(weight|bias)_v$", r".w1.\1", name)
        if name.startswith(("optimizer", "rng_state", "chained_")) or "_extra_state" in name:
            continue
        if tensor.shape and name.startswith("layers.") and not name.split(".")[1].isdigit():
            rest = name.removeprefix("layers.")
            found |= {f"layers.{i}.{rest}": tensor.layer(i) for i in range(tensor.shape[0])}
        else:
            found[name] = tensor.shard()
    args = args_of(content.get("args")) if isinstance(content, Mapping) else {}
    return RankFile(str(folder), args, None, [found])


def _version(file: RankFile) -> float:
    """Megatron takes a file without the key for the oldest; weights alone, without its args, are those of today's programs."""
    return file.version if file.version is not None else 0.0 if file.args else 2.0


def _merge_stages(stages: list[list[RankFile]]) -> dict[str, Part]:
    """Tensors by role: layers.N.<role>.<kind>, N counted over all stages; embedding, positions, final_norm.<kind>, head."""
    merged: dict[str, Part] = {}
    layers = 0
    for chunk in range(max(len(stage[0].chunks) for stage in stages)):
        for stage in stages:
            if chunk >= len(stage[0].chunks):
                continue
            ranks = [rank.chunks[chunk] for rank in stage]
            local = {
                name: [_of_rank(rank, own, name, ranks[0]) for rank, own in zip(stage, ranks, strict=True)] for name in ranks[0]
            }
            numbers = {int(match[1]) for name in local if (match := re.match(r"layers\.(\d+)\.", name))}
            least = min(numbers, default=0)
            for name, part in local.items():
                if _IGNORED.fullmatch(name):
                    continue
                role = _role(name, layers - least)
                if role in ("embedding", "positions") and role in merged:
                    continue  # the copy for a tied head
                if role in merged:
                    raise ValueError(f"{part[0].file}: {name} stands for {role}, which {merged[role][0].file} has too")
                merged[role] = part
            if numbers and numbers != set(range(least, least + len(numbers))):
                raise ValueError(f"{stage[0].path}: layers {sorted(numbers)} are not consecutive")
            layers += len(numbers)
    return merged


def _of_rank(rank: RankFile, tensors: Mapping[str, Shard], name: str, first: Mapping[str, Shard]) -> Shard:
    if name not in tensors or len(tensors) != len(first):
        odd = sorted(set(tensors) ^ set(first))
        raise ValueError(f"{rank.path}: has other tensors than the first rank: {', '.join(odd[:3])}")
    return tensors[name]


def _role(name: str, shift: int) -> str:
    """Unknown names stay, so that they are reported as found."""
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    prefix, base = (f"layers.{int(layer[1]) + shift}.", layer[2]) if layer else ("", name)
    if expert := _EXPERT.fullmatch(base):
        return f"{prefix}experts.{expert[1]}.{'up' if expert[2] == '1' else 'down'}.{expert[3]}"
    for role, stored in (_LAYER_ROLES if layer else _ROLES).items():
        for module in stored:
            if module.endswith("_") and base.startswith(module):
                return f"{prefix}{role}.{base.removeprefix(module)}"
            if base == module:
                return f"{prefix}{role}.weight" if layer else role
            if base in (f"{module}.weight", f"{module}.bias"):
                return f"{prefix}{role}.{base.rpartition('.')[2]}"
    return prefix + base


def _translate(role: str, part: Part, sizes: Sizes, order: _QkvOrder, *, gated: bool) -> dict[str, Derived]:
    """One tensor, or the parts of a fused one, under the target's names. `gated`: where the target has a gate, it is stored in
    one tensor with `up`, [gate; up] in each rank."""
    layer = re.fullmatch(r"layers\.(\d+)\.(?:experts\.(\d+)\.)?(\w+)\.(weight|bias)", role)
    names = NAMES[sizes.target]
    if layer is None:
        base, _, kind = role.rpartition(".")
        if base == "final_norm":
            return {f"{names['final_norm']}.{kind}": joined(role, part, None)}
        if role == "positions":
            return {names["positions"]: joined(role, part, None)} if "positions" in names else {role: joined(role, part, None)}
        return {} if role in ("embedding", "head") else {role: joined(role, part, None)}
    expert, what, kind = layer[2], layer[3], layer[4]
    sort = "" if expert is None else "expert_"
    if what.startswith("shared_"):
        sort, what = "shared_", what.removeprefix("shared_")

    def name(key: str) -> str:
        module = names.get(sort + key)
        return role if module is None else f"{names['layer'].format(layer[1])}.{module.format(expert)}.{kind}"

    if what == "qkv":
        if "q" in names:
            return {name(key): order.part(role, part, key) for key in "qkv"}
        return {name("qkv"): order.by_head(role, part) if sizes.target in BY_HEAD else order.fused(role, part)}
    if what == "up" and gated and f"{sort}gate" in names:
        return {
            name("gate"): joined(role, part, _BY_ROWS, lambda values: values[: len(values) // 2]),
            name("up"): joined(role, part, _BY_ROWS, lambda values: values[len(values) // 2 :]),
        }
    if what in ("gate", "up"):
        return {name(what): joined(role, part, _BY_ROWS)}
    return {name(what): joined(role, part, _BY_COLUMNS if what in ("out", "down") and kind == "weight" else None)}


def _vocabulary(parts: dict[str, Part], sizes: Sizes) -> dict[str, Derived]:
    """Embedding and head without the rows that pad them to a multiple of the ranks."""
    found = {}
    for role in ("embedding", "head"):
        if role in parts:
            table = joined(role, parts[role], _BY_ROWS)
            found[NAMES[sizes.target][role]] = _first_rows(table, sizes.vocab)
    return found


def _first_rows(table: Derived, rows: int) -> Derived:
    if rows >= table.shape[0]:
        return table
    shape = (rows, *table.shape[1:])
    return replace(table, shape=shape, nbytes=table.nbytes * rows // table.shape[0], read=lambda: table.read()[:rows])


class _QkvOrder:
    """The rows of a fused qkv in one rank: [3, heads, d] in checkpoint version 0, [heads, d, 3] in 1, since 2 (and wherever KV
    heads are shared) group by group: the group's queries, its key, its value."""

    def __init__(self, sizes: Sizes, ranks: int, version: float) -> None:
        self._d = sizes.head_dim
        self._ratio = sizes.heads // max(sizes.kv_heads, ranks)  # queries of a group; more ranks than KV heads hold copies
        self._copies = max(1, ranks // sizes.kv_heads)
        self._version = version if sizes.heads == sizes.kv_heads else 2.0

    def part(self, role: str, shards: Part, which: str) -> Derived:
        shards = shards if which == "q" else shards[:: self._copies]
        return joined(role, shards, _BY_ROWS, self._checked(role, shards, lambda values: self._rows(values, which)))

    def fused(self, role: str, shards: Part) -> Derived:
        """q | k | v over all ranks."""
        parts = [self.part(role, shards, which) for which in "qkv"]
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        nbytes = sum(part.nbytes for part in parts)
        return replace(parts[0], shape=shape, nbytes=nbytes, read=lambda: np.concatenate([part.read() for part in parts]))

    def by_head(self, role: str, shards: Part) -> Derived:
        """q, k and v of the first head, of the second, ..."""
        if self._ratio != 1:
            raise ValueError(f"{shards[0].file}: {role}: this architecture with fewer KV heads than heads is not supported")

        def take(values: Array) -> Array:
            parts = [self._rows(values, which).reshape(-1, self._d, *values.shape[1:]) for which in "qkv"]
            ordered: Array = np.stack(parts, 1).reshape(values.shape)
            return ordered

        return joined(role, shards, _BY_ROWS, whole if self._version >= 2 else self._checked(role, shards, take))

    def _checked(self, role: str, shards: Part, take: Callable[[Array], Array]) -> Callable[[Array], Array]:
        for shard in shards:
            if not shard.shape or shard.shape[0] % ((self._ratio + 2) * self._d):
                raise ValueError(
                    f"{shard.file}: {role} has shape {shard.shape}, expected rows in multiples of {(self._ratio + 2) * self._d} "
                    f"({self._ratio} queries, a key and a value of {self._d} each)"
                )
        return take

    def _rows(self, values: Array, which: str) -> Array:
        rest, index = values.shape[1:], "qkv".index(which)
        if self._version < 1:
            picked = values.reshape(3, -1, *rest)[index]
        elif self._version < 2:
            picked = values.reshape(-1, 3, *rest)[:, index]
        else:
            groups = values.reshape(-1, self._ratio + 2, self._d, *rest)
            picked = groups[:, : self._ratio] if which == "q" else groups[:, self._ratio + index - 1]
        ordered: Array = picked.reshape(-1, *rest)
        return ordered
