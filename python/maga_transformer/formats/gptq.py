"""GPTQ (https://arxiv.org/abs/2210.17323) as AutoGPTQ and GPTQModel store it. For a linear of N rows and K columns:

qweight int32 (K * bits / 32, N), codes along K, the lowest bits first; qzeros int32 (groups, N * bits / 32), likewise along N;
scales (groups, N); g_idx int32 (K), the group of each column. W[n, k] = scales[g, n] * (code[k, n] - zero[g, n]). The first
version of the format stores zeros less one."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt

from maga_transformer.checkpoint.interface import Checkpoint
from maga_transformer.formats.canonical import Affine, Canonical, Dense
from maga_transformer.formats.quantized import floats, group_size, setting, tensor_of, unpack

log = logging.getLogger(__name__)

_SUFFIXES = (".qweight", ".qzeros", ".scales", ".g_idx")


class Gptq:
    def __init__(self, checkpoint: Checkpoint, settings: dict[str, Any]) -> None:
        self._bits: int = setting(checkpoint, settings, "bits", (2, 3, 4, 8))
        self._group = group_size(checkpoint, settings)
        stored = settings.get("checkpoint_format", settings.get("format")) or "gptq"
        self._zero_offset = {"gptq": 1, "gptq_v2": 0}[
            setting(checkpoint, {"checkpoint_format": stored}, "checkpoint_format", ("gptq", "gptq_v2"))
        ]
        if settings.get("is_marlin_format"):
            raise ValueError(
                f"{checkpoint.path}: quantization_config is_marlin_format is true: Marlin's own layout is not supported"
            )
        if settings.get("dynamic"):
            raise ValueError(f"{checkpoint.path}: quantization_config dynamic (other settings for some modules) is not supported")
        # Columns by the size of what they meet: which group each is in, only g_idx says.
        self._needs_groups = bool(settings.get("desc_act")) and not settings.get("static_groups") and self._group != -1
        self._ordered: dict[str, bool] = {}

    def modules(self, checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
        names = set(checkpoint.names())
        found = [name.removesuffix(".qweight") for name in names if name.endswith(".qweight")]
        return {
            module: tuple(
                module + suffix for suffix in _SUFFIXES if module + suffix in names or self._needs_groups or suffix != ".g_idx"
            )
            for module in sorted(found)
        }

    def shape(self, checkpoint: Checkpoint, module: str) -> tuple[int, int]:
        words, rows = tensor_of(checkpoint, module + ".qweight", ("int32",), (None, None)).shape
        columns, rest = divmod(words * 32, self._bits)
        if rest:
            raise ValueError(f"{checkpoint.file(module + '.qweight')}: tensor {module}.qweight has {words} words, no whole codes")
        return rows, columns

    def form(self, checkpoint: Checkpoint, module: str) -> str:
        if not self._in_order(checkpoint, module):
            return "fp16 of gptq"
        return f"gptq{self._bits} by {self._columns(checkpoint, module)}"

    def read(self, checkpoint: Checkpoint, module: str) -> Canonical:
        rows, columns = self.shape(checkpoint, module)
        group = self._columns(checkpoint, module)
        groups = -(-columns // group)
        words = tensor_of(checkpoint, module + ".qweight", ("int32",), (None, rows))
        codes = unpack(words.T, self._bits, columns)
        scale = np.ascontiguousarray(floats(checkpoint, module + ".scales", (groups, rows)).T)
        packed = tensor_of(checkpoint, module + ".qzeros", ("int32",), (groups, -(-rows * self._bits // 32)))
        zeros = unpack(packed, self._bits, rows).T + np.uint8(self._zero_offset)
        zeros &= (1 << self._bits) - 1
        if not self._in_order(checkpoint, module):
            return self._widened(checkpoint, module, codes, scale, zeros)
        if columns % group:
            raise ValueError(
                f"{checkpoint.file(module + '.scales')}: {module} has {columns} columns in groups of {group}, the last is short"
            )
        middle = 1 << (self._bits - 1)
        if (zeros == middle).all():
            return Affine(codes, self._bits, group, scale, None, middle)
        # Exact: products of a half and a code of few bits, and their sum, fit fp32.
        return Affine(codes, self._bits, group, scale, -scale * zeros.astype(np.float32), 0)

    def _columns(self, checkpoint: Checkpoint, module: str) -> int:
        """Columns of a group."""
        return self.shape(checkpoint, module)[1] if self._group == -1 else self._group

    def _groups_of(self, checkpoint: Checkpoint, module: str) -> npt.NDArray[np.int64]:
        """The group of each column."""
        columns = self.shape(checkpoint, module)[1]
        plain = np.arange(columns) // self._columns(checkpoint, module)
        if module + ".g_idx" not in checkpoint.names():
            return plain
        found = tensor_of(checkpoint, module + ".g_idx", ("int32",), (columns,)).astype(np.int64)
        if not found.any():  # some tools leave it empty
            return plain
        groups = plain[-1] + 1
        if found.min() < 0 or found.max() >= groups:
            raise ValueError(f"{checkpoint.file(module + '.g_idx')}: tensor {module}.g_idx names group {found.max()} of {groups}")
        return found

    def _in_order(self, checkpoint: Checkpoint, module: str) -> bool:
        """Whether groups are runs of columns; not with desc_act."""
        if module not in self._ordered:
            groups = self._groups_of(checkpoint, module)
            self._ordered[module] = bool((groups == np.arange(len(groups)) // self._columns(checkpoint, module)).all())
        return self._ordered[module]

    def _widened(
        self,
        checkpoint: Checkpoint,
        module: str,
        codes: npt.NDArray[np.uint8],
        scale: npt.NDArray[np.float32],
        zeros: npt.NDArray[np.uint8],
    ) -> Dense:
        log.warning("%s: its groups are no runs of columns (desc_act): widened to fp16", module)
        groups = self._groups_of(checkpoint, module)
        values = codes.astype(np.float32)
        values -= zeros[:, groups]
        values *= scale[:, groups]
        return Dense(values.astype(np.float16), "fp16")
