"""From a checkpoint's tensors to canonical weights (canonical.py), whatever format they are stored in."""

from typing import Any

import numpy as np
import numpy.typing as npt

from maga_transformer.checkpoint.interface import Checkpoint
from maga_transformer.checkpoint.source import Source
from maga_transformer.formats.canonical import Affine, Canonical, Dense, concatenate, scaled, unit_rows
from maga_transformer.formats.ggml import FORMATS, affine_from_blocks

__all__ = ["Affine", "Canonical", "Dense", "concatenate", "read_weight"]


def read_weight(checkpoint: Checkpoint, sources: list[str]) -> Canonical:
    """The canonical form of one weight: its sources (checkpoint/source.py), stacked along their rows."""
    return concatenate([_read_source(checkpoint, Source.parse(source)) for source in sources])


def _read_source(checkpoint: Checkpoint, source: Source) -> Canonical:
    if source.layout and checkpoint.dtype(source.tensor) in FORMATS:
        name = source.tensor
        raise ValueError(f"{checkpoint.file(name)}: tensor {name} has the type {checkpoint.dtype(name)}, its blocks lie along rows")
    weight = _canonical(checkpoint, source.tensor, source.rows_of(checkpoint.tensor(source.tensor)))
    weight = unit_rows(weight) if source.unit else weight
    return weight if source.factor == 1 else scaled(weight, source.factor)


def _canonical(checkpoint: Checkpoint, name: str, values: npt.NDArray[Any]) -> Canonical:
    """Vectors (norms, biases) become fp32, so that those of different types stack; matrices keep what they are."""
    dtype = checkpoint.dtype(name)
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
