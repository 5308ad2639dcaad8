"""Linears in float8 e4m3, of the "fp8" method (Qwen, DeepSeek, Mistral) and of compressed-tensors: `weight` (N, K) with a scale
for all of it, for each row, or for each block of a grid. Scales multiply, also those that are called weight_scale_inv."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from maga_transformer.checkpoint.interface import Checkpoint
from maga_transformer.formats.canonical import Canonical, Dense, rounded
from maga_transformer.formats.quantized import floats, setting, tensor_of

_SCALES = (".weight_scale_inv", ".weight_scale")
_OTHERS = (".input_scale", ".weight_zero_point", ".output_scale")  # of activations, which stay as they are


class Fp8:
    def __init__(self, checkpoint: Checkpoint, settings: dict[str, Any]) -> None:
        setting(checkpoint, settings, "fmt", ("e4m3", None))
        self._blocks = settings.get("weight_block_size")

    def modules(self, checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
        names = set(checkpoint.names())
        found: dict[str, tuple[str, ...]] = {}
        for name in sorted(names):
            if not name.endswith(".weight") or checkpoint.dtype(name) != "fp8_e4m3":
                continue
            module = name.removesuffix(".weight")
            scales = [module + suffix for suffix in _SCALES if module + suffix in names]
            if not scales:
                raise ValueError(f"{checkpoint.file(name)}: tensor {name} is of type fp8_e4m3 and has no {module}.weight_scale")
            found[module] = (name, scales[0], *(module + suffix for suffix in _OTHERS if module + suffix in names))
        return found

    def shape(self, checkpoint: Checkpoint, module: str) -> tuple[int, int]:
        rows, columns = tensor_of(checkpoint, module + ".weight", ("fp8_e4m3",), (None, None)).shape
        return rows, columns

    def form(self, checkpoint: Checkpoint, module: str) -> str:
        return "bf16 of fp8"

    def read(self, checkpoint: Checkpoint, module: str) -> Canonical:
        """Widened to bf16: e4m3 values fit it, their products with a scale are rounded."""
        rows, columns = self.shape(checkpoint, module)
        name = next(module + suffix for suffix in _SCALES if module + suffix in checkpoint.names())
        values = E4M3[checkpoint.tensor(module + ".weight")]
        values *= self._scale(checkpoint, name, rows, columns)
        return Dense(rounded(values, "bf16"), "bf16")

    def _scale(self, checkpoint: Checkpoint, name: str, rows: int, columns: int) -> npt.NDArray[np.float32]:
        """Broadcasts over (rows, columns)."""
        shape = checkpoint.shape(name)
        if shape in ((), (1,), (1, 1)):
            return floats(checkpoint, name, (None,) * len(shape)).reshape(1, 1)
        if shape in ((rows,), (rows, 1)):
            return floats(checkpoint, name, (None,) * len(shape)).reshape(rows, 1)
        blocks = self._blocks
        if isinstance(blocks, list) and len(blocks) == 2 and all(isinstance(size, int) and size > 0 for size in blocks):
            high, wide = blocks
            scale = floats(checkpoint, name, (-(-rows // high), -(-columns // wide)))
            return np.repeat(np.repeat(scale, high, 0)[:rows], wide, 1)[:, :columns]
        raise ValueError(
            f"{checkpoint.file(name)}: tensor {name} has shape {shape} for a weight of ({rows}, {columns}) "
            f"and weight_block_size {blocks}"
        )


def _e4m3() -> npt.NDArray[np.float32]:
    """Every code's value: 4 bits of exponent (bias 7), 3 of mantissa, no infinity."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    size[(code & 127) == 127] = np.nan
    return np.where(code >= 128, -size, size).astype(np.float32)


E4M3 = _e4m3()
