"""From a checkpoint's tensors to canonical weights (canonical.py), whatever format they are stored in."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from maga_transformer.checkpoint.gguf import SCALED
from maga_transformer.checkpoint.interface import Checkpoint
from maga_transformer.checkpoint.source import Source
from maga_transformer.formats.awq import Awq
from maga_transformer.formats.canonical import Affine, Canonical, Dense, Float8, concatenate, scaled, unit_rows
from maga_transformer.formats.compressed import compressed_tensors
from maga_transformer.formats.fp8 import Fp8
from maga_transformer.formats.ggml import FORMATS, affine_from_blocks
from maga_transformer.formats.ggml_scaled import GgmlScaled
from maga_transformer.formats.gptq import Gptq
from maga_transformer.formats.mxfp4 import Mxfp4
from maga_transformer.formats.quantized import Method, QuantizedCheckpoint, quantization_config

__all__ = ["Affine", "Canonical", "Dense", "Float8", "concatenate", "open_quantized", "read_weight"]

# quant_method of quantization_config -> its reader.
_METHODS: dict[str, Callable[[Checkpoint, dict[str, Any]], Method]] = {
    "gptq": Gptq,
    "awq": Awq,
    "fp8": Fp8,
    "compressed-tensors": compressed_tensors,
    "mxfp4": Mxfp4,
    SCALED: GgmlScaled,
}


def open_quantized(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with its quantised linears as single tensors; itself, if it has none. ValueError for methods that cannot be
    read."""
    if isinstance(checkpoint, QuantizedCheckpoint):
        return checkpoint
    found = quantization_config(checkpoint)
    if found is None:
        return checkpoint
    method, settings = found
    if method not in _METHODS:
        raise ValueError(
            f"{checkpoint.path}: quantization_config with quant_method {method!r} is not supported "
            f"(supported: {', '.join(_METHODS)})"
        )
    return QuantizedCheckpoint(checkpoint, _METHODS[method](checkpoint, settings))


def read_weight(checkpoint: Checkpoint, sources: list[str]) -> Canonical:
    """The canonical form of one weight: its sources (checkpoint/source.py), stacked along their rows."""
    return concatenate([_read_source(checkpoint, Source.parse(source)) for source in sources])


def _read_source(checkpoint: Checkpoint, source: Source) -> Canonical:
    if isinstance(checkpoint, QuantizedCheckpoint) and checkpoint.is_quantized(source.tensor):
        return _altered(_rows_of(checkpoint, source), source)
    if source.layout and checkpoint.dtype(source.tensor) in FORMATS:
        name = source.tensor
        raise ValueError(f"{checkpoint.file(name)}: tensor {name} has the type {checkpoint.dtype(name)}, its blocks lie along rows")
    weight = _canonical(checkpoint, source.tensor, source.rows_of(checkpoint.tensor(source.tensor)))
    return _altered(weight, source)


def _altered(weight: Canonical, source: Source) -> Canonical:
    if source.as_columns:  # a format's groups lie along rows
        weight = Dense(weight.values.T, weight.dtype) if isinstance(weight, Dense) else Dense(weight.dequantize().T, "fp32")
    weight = unit_rows(weight) if source.unit else weight
    return weight if source.factor == 1 else scaled(weight, source.factor)


def _rows_of(checkpoint: QuantizedCheckpoint, source: Source) -> Canonical:
    """The rows of a quantised linear that a source names."""
    name = source.tensor
    if source.layout or source.matrix is not None:
        raise ValueError(
            f"{checkpoint.file(name)}: {name} is quantised ({checkpoint.dtype(name)}): it cannot be transposed or cut out"
        )
    weight = checkpoint.canonical(name, again=source.period > 0)
    if not source.period:
        return weight
    if isinstance(weight, Dense):
        return Dense(source.rows_of(weight.values), weight.dtype)
    if isinstance(weight, Float8):
        each = weight.by_row()
        return replace(each, codes=source.rows_of(each.codes), scale=source.rows_of(each.scale))
    offset = None if weight.offset is None else source.rows_of(weight.offset)
    return replace(weight, codes=source.rows_of(weight.codes), scale=source.rows_of(weight.scale), offset=offset)


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
