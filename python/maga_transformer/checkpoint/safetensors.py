"""safetensors files (u64 header length, JSON header, data), and Hugging Face folders of them."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from maga_transformer.checkpoint.files import is_count, map_file, parse_json_object
from maga_transformer.checkpoint.folder import FolderCheckpoint

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_DIMENSIONS = 8
_INDEX = "model.safetensors.index.json"

# Stored name -> (our name, numpy type of the values). Types numpy lacks are read as their bits.
_DTYPES: dict[str, tuple[str, str]] = {
    "F64": ("fp64", "<f8"),
    "F32": ("fp32", "<f4"),
    "F16": ("fp16", "<f2"),
    "BF16": ("bf16", "<u2"),
    "F8_E4M3": ("fp8_e4m3", "u1"),
    "F8_E5M2": ("fp8_e5m2", "u1"),
    "F8_E8M0": ("fp8_e8m0", "u1"),
    "I64": ("int64", "<i8"),
    "I32": ("int32", "<i4"),
    "I16": ("int16", "<i2"),
    "I8": ("int8", "i1"),
    "U64": ("uint64", "<u8"),
    "U32": ("uint32", "<u4"),
    "U16": ("uint16", "<u2"),
    "U8": ("uint8", "u1"),
    "BOOL": ("bool", "?"),
}


@dataclass(frozen=True)
class _Entry:
    dtype: str
    numpy_dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int  # byte in the file
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class SafetensorsFile:
    """One file, its header checked in full: types, extents, and that the tensors tile the data without gap or overlap."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._map = map_file(path)
        size = len(self._map)
        if size < 8:
            raise ValueError(f"{path}: {size} bytes is too short for a safetensors file")
        header_bytes = int.from_bytes(self._map[:8], "little")
        if header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(
                f"{path}: header of {header_bytes} bytes does not fit (file of {size} bytes); truncated or not safetensors"
            )
        header = parse_json_object(self._map[8 : 8 + header_bytes], f"{path}: header")
        header.pop("__metadata__", None)
        self.entries = {name: _parse_entry(path, name, entry, 8 + header_bytes) for name, entry in header.items()}
        end = 8 + header_bytes
        for name, entry in sorted(self.entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin != end:
                what = "overlaps the one before it" if entry.begin < end else "leaves a gap before it"
                raise ValueError(f"{path}: tensor {name} {what} (starts at byte {entry.begin}, expected {end})")
            end = entry.end
        if end != size:
            raise ValueError(f"{path}: tensors end at byte {end}, the file has {size} bytes; truncated or padded")

    def tensor(self, name: str) -> npt.NDArray[Any]:
        entry = self.entries[name]
        values = np.frombuffer(self._map, entry.numpy_dtype, math.prod(entry.shape), entry.begin)
        return values.reshape(entry.shape)


def _parse_entry(path: str, name: str, entry: object, data_start: int) -> _Entry:
    where = f"{path}: tensor {name}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"{where}: header entry without dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"{where}: unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not all(is_count(size) for size in shape):
        raise ValueError(f"{where}: shape {shape!r} is not a list of sizes")
    if len(shape) > _MAX_DIMENSIONS or math.prod(size or 1 for size in shape) >= 1 << 62:
        raise ValueError(f"{where}: shape of {len(shape)} dimensions or its sizes are beyond any tensor")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(is_count(offset) for offset in offsets):
        raise ValueError(f"{where}: data_offsets {offsets!r} are not two byte positions")
    our_name, numpy_name = _DTYPES[dtype]
    numpy_dtype = np.dtype(numpy_name)
    expected = math.prod(shape) * numpy_dtype.itemsize
    if offsets[1] - offsets[0] != expected:
        raise ValueError(
            f"{where}: {dtype} of shape {shape} needs {expected} bytes, data_offsets {offsets} give {offsets[1] - offsets[0]}"
        )
    return _Entry(our_name, numpy_dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


class SafetensorsCheckpoint(FolderCheckpoint):
    """A folder with config.json and model.safetensors, or shards that model.safetensors.index.json lists."""

    def __init__(self, path: str) -> None:
        super().__init__(path, SafetensorsFile, index=_INDEX, unindexed=_unindexed_files)


def _unindexed_files(folder: str) -> list[str]:
    """model.safetensors where it exists, else every safetensors file that is not an adapter."""
    single = os.path.join(folder, "model.safetensors")
    if os.path.isfile(single):
        return [single]
    return [str(file) for file in sorted(Path(folder).glob("*.safetensors")) if not file.name.startswith("adapter_")]
