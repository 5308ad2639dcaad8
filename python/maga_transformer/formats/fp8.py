"""Linears in float8 e4m3, of the "fp8" method (Qwen, DeepSeek, Mistral) and of compressed-tensors: `weight` (N, K) with a scale
for all of it, for each row, or for each block of a grid. Scales multiply, also those that are called weight_scale_inv."""

from __future__ import annotations

from typing import Any

import numpy as np

from maga_transformer.checkpoint.interface import Checkpoint
from maga_transformer.formats.canonical import Canonical, Float8
from maga_transformer.formats.quantized import floats, setting, tensor_of

_SCALES = (".weight_scale_inv", ".weight_scale")
# Of activations. Kernels that round them take the scale from each token's own values, which is more exact than one for all texts.
_OTHERS = (".input_scale", ".weight_zero_point", ".output_scale")


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
        blocks = self._block(checkpoint, module)
        return "fp8_e4m3" if blocks[1] >= self.shape(checkpoint, module)[1] else f"fp8_e4m3 by {blocks[0]}x{blocks[1]}"

    def read(self, checkpoint: Checkpoint, module: str) -> Canonical:
        rows, columns = self.shape(checkpoint, module)
        high, wide = self._block(checkpoint, module)
        name = self._scale(checkpoint, module)
        scale = floats(checkpoint, name, (None,) * len(checkpoint.shape(name))).reshape(-(-rows // high), -(-columns // wide))
        codes = np.asarray(checkpoint.tensor(module + ".weight"))
        return Float8(codes, (high, wide), np.ascontiguousarray(scale))

    def _scale(self, checkpoint: Checkpoint, module: str) -> str:
        return next(module + suffix for suffix in _SCALES if module + suffix in checkpoint.names())

    def _block(self, checkpoint: Checkpoint, module: str) -> tuple[int, int]:
        """Rows and columns that share a scale, as its shape tells."""
        rows, columns = self.shape(checkpoint, module)
        name = self._scale(checkpoint, module)
        shape = checkpoint.shape(name)
        if shape in ((), (1,), (1, 1)):
            return rows, columns
        if shape in ((rows,), (rows, 1)):
            return 1, columns
        blocks = self._blocks
        if isinstance(blocks, list) and len(blocks) == 2 and all(isinstance(size, int) and size > 0 for size in blocks):
            high, wide = blocks
            expected = (-(-rows // high), -(-columns // wide))
            if shape != expected:
                raise ValueError(f"{checkpoint.file(name)}: tensor {name} has shape {shape}, expected {expected}")
            return high, wide
        raise ValueError(
            f"{checkpoint.file(name)}: tensor {name} has shape {shape} for a weight of ({rows}, {columns}) "
            f"and weight_block_size {blocks}"
        )
