"""Where Megatron-LM and DeepSpeed put a model's files, and what one rank's file holds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from maga_transformer.checkpoint.derived import Shard
from maga_transformer.checkpoint.torch_dist import is_distributed
from maga_transformer.checkpoint.torch_file import TorchFile, tensors_of
from maga_transformer.checkpoint.torch_pickle import Inert

_RANK_FOLDER = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?")
_RANK_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")  # DeepSpeed's
EXPERT = re.compile(r"(layers\.\d+\.mlp\.experts\.local_experts\.)(\d+)(\..+)")
_MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
_TRACKERS = ("latest_checkpointed_iteration.txt", "latest")
_ITERATIONS = ("iter_*", "release", "global_step*")


def find_megatron(folder: Path) -> Path | None:
    """The folder that holds mp_rank_*, or a distributed checkpoint: this one, or that of the iteration which its tracker file
    names, or its only one."""
    if _holds_model(folder):
        return folder
    for tracker in (folder / name for name in _TRACKERS):
        if tracker.is_file():
            word = tracker.read_text(encoding="utf-8", errors="replace").strip()
            named = folder / (f"iter_{int(word):07d}" if word.isdecimal() else word)
            if Path(named).parent != folder or not named.is_dir():
                raise FileNotFoundError(f"{tracker}: names {word!r}, but {named} is not a folder here")
            return _with_model(named)
    found = [place for pattern in _ITERATIONS for place in sorted(folder.glob(pattern)) if _holds_model(place)]
    if len(found) > 1:
        names = ", ".join(place.name for place in found)
        raise ValueError(f"{folder}: holds several iterations and no {_TRACKERS[0]}; give one of them: {names}")
    return found[0] if found else None


def _with_model(folder: Path) -> Path:
    if _holds_model(folder):
        return folder
    if (folder / "metadata.json").exists():
        raise ValueError(f"{folder}: a distributed checkpoint in the zarr format is not supported; save it as torch_dist")
    raise FileNotFoundError(f"{folder}: no mp_rank_* and no .metadata here")


def _holds_model(folder: Path) -> bool:
    ranks = any(_RANK_FOLDER.fullmatch(place.name) or _RANK_FILE.fullmatch(place.name) for place in folder.glob("mp_rank_*"))
    return ranks or is_distributed(folder)


def rank_files(folder: Path) -> list[list[list[Path]]]:
    """[pipeline stage][tensor rank][expert rank]"""
    found: dict[tuple[int, int, int], Path] = {}
    for place in sorted(folder.glob("mp_rank_*")):
        if match := _RANK_FOLDER.fullmatch(place.name):
            found[int(match[2] or 0), int(match[1]), int(match[3] or 0)] = _model_file(place)
        elif match := _RANK_FILE.fullmatch(place.name):
            found[0, int(match[1]), 0] = place
    if any(index[0] for index in found) and not any(index[2] for index in found) and _has_no_stages(found):
        found = {(0, rank, expert): place for (expert, rank, _), place in found.items()}
    stages, ranks, experts = (1 + max(index[axis] for index in found) for axis in range(3))
    for stage, rank, expert in product(range(stages), range(ranks), range(experts)):
        if (stage, rank, expert) not in found:
            of_experts = f", expert rank {expert}," if experts > 1 else ""
            raise FileNotFoundError(
                f"{folder}: tensor rank {rank}{of_experts} of pipeline stage {stage} is missing (there are {len(found)} ranks)"
            )
    return [[[found[stage, rank, expert] for expert in range(experts)] for rank in range(ranks)] for stage in range(stages)]


def _has_no_stages(found: Mapping[tuple[int, int, int], Path]) -> bool:
    """Whether the second number of mp_rank_00_001 is that of an expert rank: only the args say so."""
    args = read_rank(next(iter(found.values()))).args
    return (args.get("expert_model_parallel_size") or 1) > 1 and (args.get("pipeline_model_parallel_size") or 1) == 1


def _model_file(folder: Path) -> Path:
    for name in _MODEL_FILES:
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"{folder}: none of {', '.join(_MODEL_FILES)} is here")


@dataclass(frozen=True)
class RankFile:
    path: str
    args: Mapping[str, Any]  # of the program that wrote it; empty if the file has none
    version: float | None  # checkpoint_version
    chunks: list[dict[str, Shard]]  # of virtual pipeline stages; one without them


def read_rank(path: Path) -> RankFile:
    file = TorchFile(str(path), inert=True)
    content = file.content
    if not isinstance(content, Mapping):
        raise ValueError(f"{path}: holds a {type(content).__name__}, expected the dictionary of a Megatron checkpoint")
    parts: list[Any] = [content[name] for name in ("model", "module") if isinstance(content.get(name), Mapping)][:1]
    if not parts:
        virtual = sorted((key for key in content if re.fullmatch(r"model\d+", str(key))), key=lambda key: int(key[5:]))
        parts = [content[key] for key in virtual] or [content]
    chunks = []
    for part in parts:
        stored = tensors_of(part, str(path))
        chunks.append({plain_name(name): Shard(t.dtype, t.shape, str(path), partial(file.tensor, t)) for name, t in stored.items()})
    version = content.get("checkpoint_version")
    return RankFile(str(path), args_of(content.get("args")), version if isinstance(version, (int, float)) else None, chunks)


def with_all_experts(ranks: list[RankFile]) -> RankFile:
    """Of expert ranks, which hold experts of their own, numbered from 0, and the same of all else."""
    first = ranks[0]
    chunks = [dict(chunk) for chunk in first.chunks]
    for number, rank in enumerate(ranks[1:], 1):
        for chunk, own, merged in zip(first.chunks, rank.chunks, chunks, strict=True):
            if own.keys() != chunk.keys():
                odd = ", ".join(sorted(own.keys() ^ chunk.keys())[:3])
                raise ValueError(f"{rank.path}: has other tensors than the first expert rank: {odd}")
            count = 1 + max((int(match[2]) for name in chunk if (match := EXPERT.fullmatch(name))), default=-1)
            for name, shard in own.items():
                if match := EXPERT.fullmatch(name):
                    merged[f"{match[1]}{number * count + int(match[2])}{match[3]}"] = shard
    numbers = {int(match[2]) for chunk in chunks for name in chunk if (match := EXPERT.fullmatch(name))}
    wanted = first.args.get("num_experts")
    if numbers and isinstance(wanted, int) and len(numbers) != wanted:
        raise FileNotFoundError(
            f"{first.path}: {len(ranks)} expert ranks are here, with {len(numbers)} of the {wanted} experts that num_experts says"
        )
    return replace(first, chunks=chunks)


def args_of(value: object) -> Mapping[str, Any]:
    """An argparse.Namespace, or a dictionary."""
    if isinstance(value, Inert):
        value = value.state
    return value if isinstance(value, Mapping) else {}


def plain_name(name: str) -> str:
    """Without the names of the modules around: layers.0.mlp.linear_fc1.weight. Experts that one module multiplies together are
    named as those that are modules of their own."""
    while True:
        head, _, rest = name.partition(".")
        if head not in ("module", "model", "language_model", "transformer", "encoder", "decoder") or not rest:
            return re.sub(r"\.experts\.(linear_fc[12])\.weight(\d+)$", r".experts.local_experts.\2.\1.weight", name)
        name = rest
