"""GGUF weights that a tensor of one number multiplies, as converted NVFP4 models have them."""

from __future__ import annotations

from typing import Any

from maga_transformer.checkpoint.interface import Checkpoint
from maga_transformer.formats.canonical import Canonical, scaled
from maga_transformer.formats.ggml import FORMATS, affine_from_blocks
from maga_transformer.formats.quantized import floats, tensor_of


class GgmlScaled:
    def __init__(self, checkpoint: Checkpoint, settings: dict[str, Any]) -> None:
        pass

    def modules(self, checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
        found = (name.removesuffix(".weight_scale") for name in checkpoint.names() if name.endswith(".weight_scale"))
        return {module: (f"{module}.weight", f"{module}.weight_scale") for module in found}

    def shape(self, checkpoint: Checkpoint, module: str) -> tuple[int, int]:
        rows, columns = checkpoint.shape(f"{module}.weight")
        return rows, columns

    def form(self, checkpoint: Checkpoint, module: str) -> str:
        return checkpoint.dtype(f"{module}.weight")

    def read(self, checkpoint: Checkpoint, module: str) -> Canonical:
        blocks = tensor_of(checkpoint, f"{module}.weight", FORMATS, (None, None))
        (factor,) = floats(checkpoint, f"{module}.weight_scale", (1,))
        return scaled(affine_from_blocks(self.form(checkpoint, module), blocks), float(factor))
