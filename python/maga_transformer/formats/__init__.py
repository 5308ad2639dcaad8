"""From a checkpoint's tensors to canonical weights (canonical.py), whatever format they are stored in."""

import numpy as np

from maga_transformer.checkpoint.interface import Checkpoint
from maga_transformer.formats.canonical import Affine, Canonical, Dense, concatenate
from maga_transformer.formats.ggml import FORMATS, affine_from_blocks

__all__ = ["Affine", "Canonical", "Dense", "concatenate", "read_weight"]


def read_weight(checkpoint: Checkpoint, sources: list[str]) -> Canonical:
    """The canonical form of one weight: its source tensors, stacked along their rows."""
    return concatenate([_read_tensor(checkpoint, name) for name in sources])


def _read_tensor(checkpoint: Checkpoint, name: str) -> Canonical:
    """Vectors (norms, biases) become fp32, so that those of different types stack; matrices keep what they are."""
    dtype, values = checkpoint.dtype(name), checkpoint.tensor(name)
    if dtype in FORMATS:
        if values.ndim != 2:
            raise ValueError(
                f"{checkpoint.file(name)}: tensor {name} is a {values.ndim}-dimensional {dtype}, only matrices are supported"
            )
        return affine_from_blocks(dtype, values)
    if dtype == "fp64":
        return Dense(values.astype(np.float32), "fp32")
    if dtype not in ("fp32", "fp16", "bf16"):
        raise ValueError(f"{checkpoint.file(name)}: tensor {name} has the type {dtype}, which no weight can have")
    weight = Dense(values, dtype)
    return Dense(weight.dequantize(), "fp32") if values.ndim == 1 else weight
