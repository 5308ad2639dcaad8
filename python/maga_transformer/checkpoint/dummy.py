"""Random weights for a model of which only config.json is there: speed does not depend on what the numbers are."""

import math
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from maga_transformer.checkpoint.files import read_json_object

_DTYPES = {"bfloat16": ("bf16", "<u2"), "float16": ("fp16", "<f2"), "float32": ("fp32", "<f4")}
_DEVIATION = 0.02
# Values that are drawn; larger tensors repeat them. Odd, so that the rows of no usual matrix are equal.
_PERIOD = (1 << 25) - 39
_OFFSETS = 1 << 20  # places in the block where a tensor may begin


class DummyCheckpoint:
    """A Checkpoint that has every tensor which it is told of: all are views into one block of normally distributed values, each at
    a place of its own. Norm weights are 1."""

    def __init__(self, path: str) -> None:
        """`path`: a folder with config.json, or such a file."""
        place = Path(path)
        if place.is_file() and place.suffix != ".json":
            raise ValueError(f"{path}: LOAD_FORMAT=dummy needs a folder with config.json, or such a file")
        self._config_file = str(place / "config.json" if place.is_dir() else place)
        self.path = str(place if place.is_dir() else place.parent)
        self.config: dict[str, Any] = read_json_object(self._config_file)
        named = self.config.get("dtype") or self.config.get("torch_dtype") or "bfloat16"
        if named not in _DTYPES:
            raise ValueError(f"{self._config_file}: dtype is {named!r}, expected one of {', '.join(_DTYPES)}")
        self._dtype, numpy_name = _DTYPES[named]
        self._numpy_dtype = np.dtype(numpy_name)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._block: npt.NDArray[Any] | None = None
        self._lock = threading.Lock()

    def add(self, name: str, shape: tuple[int | None, ...]) -> None:
        """Every size must be known: it is the model's program that says which tensors there are."""
        sizes = tuple(size for size in shape if size is not None)
        if len(sizes) != len(shape):
            raise ValueError(
                f"{self._config_file}: tensor {name} would have the shape {shape}: config.json must say every size "
                "(vocab_size, hidden_size, intermediate_size)"
            )
        self._shapes[name] = sizes

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> str:
        return self._dtype

    def nbytes(self, name: str) -> int:
        return math.prod(self._shapes[name]) * self._numpy_dtype.itemsize

    def file(self, name: str) -> str:
        return self._config_file

    def tensor(self, name: str) -> npt.NDArray[Any]:
        shape = self._shapes[name]
        if len(shape) == 1 and name.endswith(".weight"):
            return self._stored(np.ones(shape, np.float32))
        with self._lock:
            if self._block is None:
                self._block = self._make_block()
        begin = zlib.crc32(name.encode()) % _OFFSETS
        return self._block[begin : begin + math.prod(shape)].reshape(shape)

    def release(self, name: str) -> None: ...

    def close(self) -> None:
        self._block = None

    def _make_block(self) -> npt.NDArray[Any]:
        size = _OFFSETS + max(math.prod(shape) for shape in self._shapes.values())
        drawn = np.random.default_rng(0).standard_normal(min(size, _PERIOD), np.float32)
        drawn *= _DEVIATION
        return np.resize(self._stored(drawn), size)

    def _stored(self, values: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        if self._dtype != "bf16":
            return values.astype(self._numpy_dtype)
        bits = values.view(np.uint32)
        return ((bits + 0x8000) >> 16).astype(np.uint16)
