"""Hugging Face folders with pickled weights: pytorch_model.bin, shards that its index lists, or other .bin, .pth and .pt files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from maga_transformer.checkpoint.folder import FolderCheckpoint
from maga_transformer.checkpoint.torch_file import TorchFile, tensors_of
from maga_transformer.checkpoint.torch_pickle import PickledTensor

INDEX = "pytorch_model.bin.index.json"
_SINGLE = "pytorch_model.bin"
_SUFFIXES = (".bin", ".pth", ".pt")
# What training leaves beside a model.
_OTHERS = (
    "adapter_model", "training_args", "optimizer", "scheduler", "scaler", "rng_state", "consolidated.", "common.pt",
    "colbert_linear.", "sparse_linear.",
)  # fmt: skip
# Under which programs save a state dict together with other things.
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")


class TorchCheckpoint(FolderCheckpoint):
    """A folder with config.json and torch_files of it."""

    def __init__(self, path: str) -> None:
        super().__init__(path, StateDict, index=INDEX, unindexed=torch_files)


class StateDict:
    """The tensors of one file, by name."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = TorchFile(path)
        self.entries: Mapping[str, PickledTensor] = tensors_of(_unwrapped(self._file.content), path)
        if not self.entries:
            raise ValueError(f"{path}: holds no tensors by name; what a model needs is its state_dict()")

    def tensor(self, name: str) -> npt.NDArray[Any]:
        return self._file.tensor(self.entries[name])


def torch_files(folder: str) -> list[str]:
    """pytorch_model.bin where it exists, else the files of the first suffix that has any."""
    single = Path(folder) / _SINGLE
    if single.is_file():
        return [str(single)]
    for suffix in _SUFFIXES:
        found = [str(file) for file in sorted(Path(folder).glob(f"*{suffix}")) if not file.name.startswith(_OTHERS)]
        if found:
            return found
    return []


def _unwrapped(content: Any) -> Any:
    while isinstance(content, Mapping) and not any(isinstance(value, PickledTensor) for value in content.values()):
        inner = next((content[name] for name in _WRAPPERS if isinstance(content.get(name), Mapping)), None)
        if inner is None:
            break
        content = inner
    return content
