"""Where Megatron-LM and DeepSpeed put a model's files, and what one rank's file holds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from maga_transformer.checkpoint.derived import Shard
from maga_transformer.checkpoint.torch_dist import is_distributed
from maga_transformer.checkpoint.torch_file import TorchFile, tensors_of
from maga_transformer.checkpoint.torch_pickle import Inert

_RANK_FOLDER = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?")
_RANK_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")  # DeepSpeed's
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


def rank_files(folder: Path) -> list[list[Path]]:
    """[pipeline stage][tensor rank]"""
    found: dict[tuple[int, int], Path] = {}
    for place in sorted(folder.glob("mp_rank_*")):
        if match := _RANK_FOLDER.fullmatch(place.name):
            if match[3] is not None:
                raise ValueError(f"{place}: expert parallel ranks are not supported; convert the model to safetensors")
            found[int(match[2] or 0), int(match[1])] = _model_file(place)
        elif match := _RANK_FILE.fullmatch(place.name):
            found[0, int(match[1])] = place
    stages, ranks = (1 + max(index[axis] for index in found) for axis in (0, 1))
    for stage in range(stages):
        for rank in range(ranks):
            if (stage, rank) not in found:
                raise FileNotFoundError(
                    f"{folder}: tensor rank {rank} of pipeline stage {stage} is missing (there are {len(found)} ranks)"
                )
    return [[found[stage, rank] for rank in range(ranks)] for stage in range(stages)]


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


def args_of(value: object) -> Mapping[str, Any]:
    """An argparse.Namespace, or a dictionary."""
    if isinstance(value, Inert):
        value = value.state
    return value if isinstance(value, Mapping) else {}


def plain_name(name: str) -> str:
    """Without the names of the modules around: layers.0.mlp.linear_fc1.weight."""
    while True:
        head, _, rest = name.partition(".")
        if head not in ("module", "model", "language_model", "transformer", "encoder", "decoder") or not rest:
            return name
        name = rest
