"""Writes safetensors files: whole, or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Stored = tuple[str, npt.NDArray[Any]]  # our name of a type, and the values; bf16 and fp8 as their bits

_NAMES = {
    "fp64": "F64",
    "fp32": "F32",
    "fp16": "F16",
    "bf16": "BF16",
    "fp8_e4m3": "F8_E4M3",
    "fp8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}


def write_safetensors(path: str, tensors: Mapping[str, Stored]) -> None:
    """The file appears under its name once all of it is on disk. OSError when it cannot be written."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, values) in tensors.items():
        begin, end = end, end + values.nbytes
        header[name] = {"dtype": _NAMES[dtype], "shape": list(values.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    beside = f"{path}.tmp"
    with open(beside, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, values in tensors.values():
            file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
