"""Hugging Face folders: safetensors files (u64 header length, JSON header, data), single or with a sharded index."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from maga_transformer.checkpoint.files import is_count, map_file, parse_json_object, read_json_object

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


class SafetensorsCheckpoint:
    """A folder with config.json and model.safetensors, or shards that model.safetensors.index.json lists."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.config = read_json_object(os.path.join(path, "config.json"))
        index = os.path.join(path, _INDEX)
        self._files: dict[str, SafetensorsFile] = {}  # tensor name -> its file
        if os.path.exists(index):
            self._read_index(index)
        else:
            self._read_files(_unindexed_files(path))

    def _read_files(self, paths: list[str]) -> None:
        for path in paths:
            file = SafetensorsFile(path)
            for name in file.entries:
                if name in self._files:
                    raise ValueError(f"{path}: tensor {name} is also in {self._files[name].path}")
                self._files[name] = file

    def _read_index(self, index: str) -> None:
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ValueError(f"{index}: weight_map is not an object of tensor names and file names")
        for shard in sorted(set(weight_map.values())):
            path = os.path.join(self.path, shard)
            if os.path.basename(shard) != shard:
                raise ValueError(f"{index}: shard {shard!r} is not a file name of this folder")
            if not os.path.isfile(path):
                raise FileNotFoundError(f"{path}: this shard is named by {_INDEX} but missing")
        self._read_files([os.path.join(self.path, shard) for shard in sorted(set(weight_map.values()))])
        for name, shard in weight_map.items():
            if name not in self._files or os.path.basename(self._files[name].path) != shard:
                raise ValueError(f"{os.path.join(self.path, shard)}: tensor {name} is not in the shard that {_INDEX} names")
        for name, file in self._files.items():
            if name not in weight_map:
                raise ValueError(f"{file.path}: tensor {name} is not listed in {_INDEX}")

    def _entry(self, name: str) -> _Entry:
        return self._file(name).entries[name]

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._files:
            raise ValueError(f"{self.path}: no tensor {name}")
        return self._files[name]

    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> str:
        return self._entry(name).dtype

    def nbytes(self, name: str) -> int:
        entry = self._entry(name)
        return entry.end - entry.begin

    def file(self, name: str) -> str:
        return self._file(name).path

    def tensor(self, name: str) -> npt.NDArray[Any]:
        return self._file(name).tensor(name)

    def close(self) -> None:
        self._files.clear()


def _unindexed_files(folder: str) -> list[str]:
    """model.safetensors where it exists, else every safetensors file that is not an adapter."""
    single = os.path.join(folder, "model.safetensors")
    if os.path.isfile(single):
        return [single]
    return [str(file) for file in sorted(Path(folder).glob("*.safetensors")) if not file.name.startswith("adapter_")]
