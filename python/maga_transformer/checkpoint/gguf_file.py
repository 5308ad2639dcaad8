"""The GGUF container (versions 2 and 3): metadata and tensor extents. Every count and offset is checked before it is used.

Specification: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from maga_transformer.checkpoint.files import map_file

# ggml type -> (name, elements a block, bytes a block)
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("fp32", 1, 4),
    1: ("fp16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    10: ("q2_k", 256, 84),
    11: ("q3_k", 256, 110),
    12: ("q4_k", 256, 144),
    13: ("q5_k", 256, 176),
    14: ("q6_k", 256, 210),
    16: ("iq2_xxs", 256, 66),
    17: ("iq2_xs", 256, 74),
    18: ("iq3_xxs", 256, 98),
    19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18),
    21: ("iq3_s", 256, 110),
    22: ("iq2_s", 256, 82),
    23: ("iq4_xs", 256, 136),
    24: ("int8", 1, 1),
    25: ("int16", 1, 2),
    26: ("int32", 1, 4),
    27: ("int64", 1, 8),
    28: ("fp64", 1, 8),
    29: ("iq1_m", 256, 56),
    30: ("bf16", 1, 2),
    34: ("tq1_0", 256, 54),
    35: ("tq2_0", 256, 66),
    39: ("mxfp4", 32, 17),
    40: ("nvfp4", 64, 36),
    41: ("q1_0", 128, 18),
}
_UNREADABLE_TYPES = {9: "q8_1", 15: "q8_k", 42: "q2_0"}
_NUMPY_TYPES = {
    "fp32": "<f4", "fp16": "<f2", "bf16": "<u2", "fp64": "<f8", "int8": "i1", "int16": "<i2", "int32": "<i4", "int64": "<i8",
}  # fmt: skip

# Metadata value type -> struct format; strings (8) and arrays (9) are read apart.
_SCALARS = {0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "B", 10: "<Q", 11: "<q", 12: "<d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_MAX_ARRAY_DEPTH = 4


@dataclass(frozen=True)
class GgufTensor:
    dtype: str
    shape: tuple[int, ...]  # as torch orders it
    begin: int  # byte in the file
    nbytes: int


class GgufFile:
    """One mapped file. Raises ValueError naming the file and the key or tensor for anything damaged."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._map = map_file(path)
        reader = _Reader(path, self._map)
        counts = reader.header()
        self.metadata: dict[str, Any] = {}
        for index in range(counts[1]):
            reader.place = f"metadata entry {index} of {counts[1]}"
            key = reader.string()
            reader.place = f"metadata key {key}"
            if key in self.metadata:
                raise reader.error("appears twice")
            self.metadata[key] = reader.value(reader.scalar(4))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"{path}: general.alignment {alignment!r} is not a power of two")
        found: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        for index in range(counts[0]):
            reader.place = f"tensor entry {index} of {counts[0]}"
            name = reader.string()
            reader.place = f"tensor {name}"
            if name in found:
                raise reader.error("appears twice")
            found[name] = reader.tensor_info(alignment)
        data_start = -(-reader.position // alignment) * alignment
        self.tensors = {name: GgufTensor(d, s, data_start + offset, n) for name, (d, s, offset, n) in found.items()}
        end = data_start
        for name, tensor in sorted(self.tensors.items(), key=lambda item: item[1].begin):
            if tensor.begin < end:
                raise ValueError(f"{path}: tensor {name} overlaps the one before it")
            end = tensor.begin + tensor.nbytes
            if end > len(self._map):
                raise ValueError(f"{path}: tensor {name} ends at byte {end}, the file has {len(self._map)} bytes; truncated?")

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """Values in the tensor's shape, or uint8 (..., bytes of a row) for a block format."""
        tensor = self.tensors[name]
        if tensor.dtype in _NUMPY_TYPES:
            numpy_dtype = np.dtype(_NUMPY_TYPES[tensor.dtype])
            values = np.frombuffer(self._map, numpy_dtype, tensor.nbytes // numpy_dtype.itemsize, tensor.begin)
            return values.reshape(tensor.shape)
        rows = math.prod(tensor.shape[:-1])
        blocks = np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.begin)
        return blocks.reshape(*tensor.shape[:-1], tensor.nbytes // rows)


class _Reader:
    """A position in the mapped file that cannot leave it; `place` says what is being read, for messages."""

    def __init__(self, path: str, data: mmap.mmap) -> None:
        self.path, self.data, self.size = path, data, len(data)
        self.position = 0
        self.place = "header"

    def error(self, what: str) -> ValueError:
        return ValueError(f"{self.path}: {self.place} {what}")

    def take(self, count: int) -> bytes:
        if count > self.size - self.position:
            raise self.error(f"needs {count} bytes at byte {self.position}, the file has {self.size}; truncated or damaged")
        self.position += count
        return self.data[self.position - count : self.position]

    def scalar(self, value_type: int) -> Any:
        layout = _SCALARS[value_type]
        (value,) = struct.unpack(layout, self.take(struct.calcsize(layout)))
        if value_type == _BOOL and value > 1:
            raise self.error(f"holds {value} where a boolean was expected")
        return bool(value) if value_type == _BOOL else value

    def string(self) -> str:
        data = self.take(int.from_bytes(self.take(8), "little"))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise self.error("holds a string that is not UTF-8") from None

    def value(self, value_type: int, depth: int = 0) -> Any:
        if value_type in _SCALARS:
            return self.scalar(value_type)
        if value_type == _STRING:
            return self.string()
        if value_type != _ARRAY or depth >= _MAX_ARRAY_DEPTH:
            raise self.error(f"has the unknown value type {value_type}" if value_type != _ARRAY else "nests arrays too deep")
        item_type, count = self.scalar(4), self.scalar(10)
        smallest = struct.calcsize(_SCALARS[item_type]) if item_type in _SCALARS else 8
        if count * smallest > self.size - self.position:
            raise self.error(f"claims {count} array items, more than the file holds; truncated or damaged")
        if item_type in _SCALARS:
            layout = np.dtype("?" if item_type == _BOOL else _SCALARS[item_type])
            return np.frombuffer(self.take(count * layout.itemsize), layout).tolist()
        return [self.value(item_type, depth + 1) for _ in range(count)]

    def header(self) -> tuple[int, int]:
        """(tensors, metadata entries)"""
        magic = self.take(4)
        if magic != b"GGUF":
            raise ValueError(f"{self.path}: not a GGUF file (it begins with {magic!r})")
        version = self.scalar(4)
        if version not in (2, 3):
            hint = " (big-endian files are not supported)" if version in (2 << 24, 3 << 24) else ""
            raise ValueError(f"{self.path}: GGUF version {version} is not supported, only 2 and 3 are{hint}")
        tensors, entries = self.scalar(10), self.scalar(10)
        if tensors * 24 + entries * 13 > self.size - self.position:  # the least bytes that an entry of each can take
            raise self.error(f"claims {tensors} tensors and {entries} metadata entries, more than the file holds")
        return tensors, entries

    def tensor_info(self, alignment: int) -> tuple[str, tuple[int, ...], int, int]:
        """(dtype, shape, offset in the data section, bytes)"""
        dimensions = self.scalar(4)
        if not 1 <= dimensions <= 4:
            raise self.error(f"has {dimensions} dimensions, 1 to 4 are possible")
        shape = tuple(self.scalar(10) for _ in range(dimensions))[::-1]
        type_id, offset = self.scalar(4), self.scalar(10)
        if type_id not in GGML_TYPES:
            known = ", ".join(name for name, _, _ in GGML_TYPES.values())
            raise self.error(f"has the type {_UNREADABLE_TYPES.get(type_id, type_id)}, which is not supported (supported: {known})")
        dtype, block, block_bytes = GGML_TYPES[type_id]
        if 0 in shape or math.prod(shape) >= 1 << 62:
            raise self.error(f"has the impossible shape {shape}")
        if shape[-1] % block:
            raise self.error(f"has rows of {shape[-1]} elements, {dtype} needs a multiple of {block}")
        if offset % alignment:
            raise self.error(f"starts at offset {offset}, which is not a multiple of the alignment {alignment}")
        return dtype, shape, offset, math.prod(shape) // block * block_bytes
