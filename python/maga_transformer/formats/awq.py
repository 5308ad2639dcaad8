"""AWQ (https://arxiv.org/abs/2306.00978) in the "gemm" layout. For a linear of N rows and K columns: qweight int32 (K, N / 8),
eight codes a word; qzeros int32 (K / group, N / 8), likewise; scales (K / group, N). W[n, k] = scale * (code - zero)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from maga_transformer.checkpoint.interface import Checkpoint
from maga_transformer.formats.canonical import Affine, Canonical
from maga_transformer.formats.quantized import floats, group_size, setting, tensor_of, unpack

_BITS = 4
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # the nibble of a word that holds each of its eight rows
_SUFFIXES = (".qweight", ".qzeros", ".scales")


class Awq:
    def __init__(self, checkpoint: Checkpoint, settings: dict[str, Any]) -> None:
        setting(checkpoint, settings, "bits", (_BITS,))
        version = settings.get("version", "gemm")
        setting(checkpoint, {"version": version.lower() if isinstance(version, str) else version}, "version", ("gemm",))
        setting(checkpoint, settings, "zero_point", (True,), True)
        self._group = group_size(checkpoint, settings)

    def modules(self, checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
        found = sorted(name.removesuffix(".qweight") for name in checkpoint.names() if name.endswith(".qweight"))
        return {module: tuple(module + suffix for suffix in _SUFFIXES) for module in found}

    def shape(self, checkpoint: Checkpoint, module: str) -> tuple[int, int]:
        columns, words = tensor_of(checkpoint, module + ".qweight", ("int32",), (None, None)).shape
        return words * 8, columns

    def form(self, checkpoint: Checkpoint, module: str) -> str:
        return f"awq by {self._columns(checkpoint, module)}"

    def read(self, checkpoint: Checkpoint, module: str) -> Canonical:
        rows, columns = self.shape(checkpoint, module)
        group = self._columns(checkpoint, module)
        if columns % group:
            raise ValueError(
                f"{checkpoint.file(module + '.scales')}: {module} has {columns} columns in groups of {group}, the last is short"
            )
        codes = np.ascontiguousarray(_rows(tensor_of(checkpoint, module + ".qweight", ("int32",), (columns, rows // 8))).T)
        zeros = _rows(tensor_of(checkpoint, module + ".qzeros", ("int32",), (columns // group, rows // 8))).T
        scale = np.ascontiguousarray(floats(checkpoint, module + ".scales", (columns // group, rows)).T)
        return Affine(codes, _BITS, group, scale, -scale * zeros.astype(np.float32), 0)

    def _columns(self, checkpoint: Checkpoint, module: str) -> int:
        """Columns of a group."""
        return self.shape(checkpoint, module)[1] if self._group == -1 else self._group


def _rows(words: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """(K, N / 8) words -> (K, N) codes."""
    stored = unpack(words, _BITS, words.shape[1] * 8)
    return stored.reshape(len(words), -1, 8)[:, :, _PLACES].reshape(len(words), -1)
