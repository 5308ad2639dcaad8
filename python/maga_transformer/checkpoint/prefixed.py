"""A base model's tensors under the names that they have in the whole model: some are saved without its prefix."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from maga_transformer.checkpoint.interface import Checkpoint


class PrefixedCheckpoint:
    """Every name begins with `prefix`, which the files do not know."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        self._checkpoint = checkpoint
        self._prefix = prefix
        self.path, self.config = checkpoint.path, checkpoint.config

    def names(self) -> list[str]:
        return [self._prefix + name for name in self._checkpoint.names()]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(self._own(name))

    def dtype(self, name: str) -> str:
        return self._checkpoint.dtype(self._own(name))

    def nbytes(self, name: str) -> int:
        return self._checkpoint.nbytes(self._own(name))

    def file(self, name: str) -> str:
        return self._checkpoint.file(self._own(name))

    def tensor(self, name: str) -> npt.NDArray[Any]:
        return self._checkpoint.tensor(self._own(name))

    def release(self, name: str) -> None:
        self._checkpoint.release(self._own(name))

    def close(self) -> None:
        self._checkpoint.close()

    def _own(self, name: str) -> str:
        return name.removeprefix(self._prefix)
