"""Linears that bge-m3 keeps beside its weights, each as a file of its own: colbert_linear.pt and sparse_linear.pt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy.typing as npt

from maga_transformer.checkpoint.files import release
from maga_transformer.checkpoint.interface import Checkpoint
from maga_transformer.checkpoint.torch_folder import StateDict

HEADS = ("colbert_linear", "sparse_linear")


class HeadedCheckpoint:
    """The checkpoint and the tensors of such files, as colbert_linear.weight."""

    def __init__(self, checkpoint: Checkpoint, heads: dict[str, StateDict]) -> None:
        self._checkpoint = checkpoint
        self._heads = {f"{head}.{name}": (file, name) for head, file in heads.items() for name in file.entries}
        self.path, self.config = checkpoint.path, checkpoint.config

    def names(self) -> list[str]:
        return [*self._checkpoint.names(), *self._heads]

    def shape(self, name: str) -> tuple[int, ...]:
        found = self._heads.get(name)
        return found[0].entries[found[1]].shape if found else self._checkpoint.shape(name)

    def dtype(self, name: str) -> str:
        found = self._heads.get(name)
        return found[0].entries[found[1]].dtype if found else self._checkpoint.dtype(name)

    def nbytes(self, name: str) -> int:
        found = self._heads.get(name)
        return found[0].entries[found[1]].nbytes if found else self._checkpoint.nbytes(name)

    def file(self, name: str) -> str:
        found = self._heads.get(name)
        return found[0].path if found else self._checkpoint.file(name)

    def tensor(self, name: str) -> npt.NDArray[Any]:
        found = self._heads.get(name)
        return found[0].tensor(found[1]) if found else self._checkpoint.tensor(name)

    def release(self, name: str) -> None:
        release(self.tensor(name)) if name in self._heads else self._checkpoint.release(name)

    def close(self) -> None:
        self._heads.clear()
        self._checkpoint.close()


def with_heads(checkpoint: Checkpoint) -> Checkpoint:
    """Itself, unless its folder has all of these files."""
    files = {head: Path(checkpoint.path) / f"{head}.pt" for head in HEADS}
    if not all(file.is_file() for file in files.values()):
        return checkpoint
    return HeadedCheckpoint(checkpoint, {head: StateDict(str(file)) for head, file in files.items()})
