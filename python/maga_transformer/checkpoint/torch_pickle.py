"""Pickles of torch, read without torch and without trust: they yield tensors and plain values; what else they name is not run."""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

# torch.<name>Storage, torch.<dtype> -> (our name, numpy type of the values). Types numpy lacks are read as their bits.
_STORAGES = {
    "Double": ("fp64", "<f8"),
    "Float": ("fp32", "<f4"),
    "Half": ("fp16", "<f2"),
    "BFloat16": ("bf16", "<u2"),
    "Long": ("int64", "<i8"),
    "Int": ("int32", "<i4"),
    "Short": ("int16", "<i2"),
    "Char": ("int8", "i1"),
    "Byte": ("uint8", "u1"),
    "Bool": ("bool", "?"),
    "Untyped": ("uint8", "u1"),
}
_DTYPES = {
    "float64": ("fp64", "<f8"),
    "float32": ("fp32", "<f4"),
    "float16": ("fp16", "<f2"),
    "bfloat16": ("bf16", "<u2"),
    "float8_e4m3fn": ("fp8_e4m3", "u1"),
    "float8_e5m2": ("fp8_e5m2", "u1"),
    "float8_e8m0fnu": ("fp8_e8m0", "u1"),
    "int64": ("int64", "<i8"),
    "int32": ("int32", "<i4"),
    "int16": ("int16", "<i2"),
    "int8": ("int8", "i1"),
    "uint64": ("uint64", "<u8"),
    "uint32": ("uint32", "<u4"),
    "uint16": ("uint16", "<u2"),
    "uint8": ("uint8", "u1"),
    "bool": ("bool", "?"),
}
_MAX_DIMENSIONS = 8


@dataclass(frozen=True)
class ElementType:
    name: str  # as Checkpoint.dtype says it
    numpy: np.dtype[Any]


@dataclass
class Storage:
    """A run of bytes in the file, which several tensors may share; its place becomes known after the pickle is read."""

    key: str
    element: ElementType
    numel: int
    begin: int = -1  # byte in the file

    @property
    def nbytes(self) -> int:
        return self.numel * self.element.numpy.itemsize


@dataclass(frozen=True)
class PickledTensor:
    storage: Storage
    element: ElementType
    offset: int  # elements
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # elements

    @property
    def dtype(self) -> str:
        return self.element.name

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.element.numpy.itemsize


class Inert:
    """Stands for an object of a class that is not known: it keeps what the pickle gives it and does nothing."""

    origin = ""  # of the class, as the pickle names it

    def __new__(cls, *arguments: Any, **named: Any) -> Inert:
        made = super().__new__(cls)
        made.arguments, made.state = arguments, None
        return made

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.arguments: tuple[Any, ...]
        self.state: Any  # what __setstate__ of the class would get

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __call__(self, *arguments: Any, **named: Any) -> Inert:
        return self

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None: ...

    def extend(self, values: Any) -> None: ...


def read_pickle(data: bytes, path: str, storage: Callable[[str, ElementType, int], Storage], *, inert: bool = False) -> Any:
    """`storage` finds or makes a storage by key, element type and number of elements. Classes beside those that tensors need are
    refused by name; with `inert`, Inert objects take their place. ValueError names `path` for whatever is wrong."""
    try:
        check_opcodes(io.BytesIO(data))
        return _Unpickler(data, path, storage, inert).load()
    except _Refused as error:
        raise ValueError(str(error)) from None
    except Exception as error:  # a damaged pickle can make the unpickler raise anything
        raise ValueError(f"{path}: the pickle is damaged: {type(error).__name__}: {error}") from None


def check_opcodes(file: Any) -> None:
    """Reads one pickle from `file`, to its end. A memo slot far beyond the number of opcodes would make the unpickler take that
    much memory."""
    for count, (opcode, argument, _) in enumerate(pickletools.genops(file)):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and (argument or 0) > count:
            raise ValueError(f"memo slot {argument} at opcode {count}")


class _Refused(Exception):
    pass


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, path: str, storage: Callable[[str, ElementType, int], Storage], inert: bool) -> None:
        super().__init__(io.BytesIO(data), encoding="latin1")  # of numpy arrays that Python 2 wrote
        self._path, self._storage, self._inert = path, storage, inert

    def find_class(self, module: str, name: str) -> Any:
        module = "builtins" if module == "__builtin__" else module
        known = _KNOWN.get((module, name))
        if known is not None:
            return known
        if module in ("torch", "torch.storage") and name.removesuffix("Storage") in _STORAGES and name.endswith("Storage"):
            return _element(*_STORAGES[name.removesuffix("Storage")])
        if module == "torch" and name in _DTYPES:
            return _element(*_DTYPES[name])
        if self._inert:
            return type(name, (Inert,), {"origin": f"{module}.{name}"})
        raise _Refused(
            f"{self._path}: this pickle wants {module}.{name}, which is more than tensors, and is not opened; "
            "save model.state_dict(), or safetensors, instead"
        )

    def persistent_load(self, pid: Any) -> Any:
        if self._inert and pid[0] == "module":
            return pid[1]  # a class, with its source
        if self._inert and not isinstance(pid[1], ElementType):
            return Inert()  # a storage of a type that no weight has
        kind, element, key, _, numel, *view = pid
        if kind != "storage" or not isinstance(element, ElementType) or not isinstance(numel, int) or numel < 0:
            raise ValueError(f"persistent id {pid!r} is not a storage")
        if view and view[0] is not None:
            raise ValueError("storages that are views of others are not supported")
        return self._storage(str(key), element, numel)


def _element(name: str, numpy_name: str) -> ElementType:
    return ElementType(name, np.dtype(numpy_name))


def _tensor(storage: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any) -> PickledTensor | Inert:
    return storage if isinstance(storage, Inert) else _checked(storage, storage.element, offset, shape, strides)


def _tensor_of_dtype(
    storage: Storage,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    grad: Any,
    hooks: Any,
    dtype: ElementType,
    *_: Any,
) -> PickledTensor:
    return _checked(storage, dtype, offset, shape, strides)


def _checked(storage: Storage, element: ElementType, offset: int, shape: Any, strides: Any) -> PickledTensor:
    if not isinstance(storage, Storage) or not isinstance(element, ElementType):
        raise ValueError("a tensor without a storage and a type")
    shape, strides = tuple(shape), tuple(strides)
    if any(not isinstance(value, int) or not 0 <= value < 1 << 62 for value in (offset, *shape, *strides)):
        raise ValueError(f"a tensor of offset {offset}, shape {shape} and strides {strides}")
    if len(shape) != len(strides) or len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"a tensor of shape {shape} and strides {strides}")
    tensor = PickledTensor(storage, element, offset, shape, strides)
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if 0 not in shape and (last + 1) * element.numpy.itemsize > storage.nbytes:
        raise ValueError(f"a tensor of shape {shape} reaches beyond its storage of {storage.nbytes} bytes")
    if tensor.nbytes > storage.nbytes:
        raise ValueError(f"a tensor of shape {shape} repeats the elements of its storage")
    return tensor


def _first(value: Any, *_: Any) -> Any:
    return value


def _rebuild_from_type(rebuild: Any, kind: Any, arguments: Any, state: Any) -> Any:
    if rebuild not in (_tensor, _tensor_of_dtype, _first):
        raise ValueError("a tensor that is not built as tensors are")
    return rebuild(*arguments)


def _encode(text: str, encoding: str = "latin1") -> bytes:
    return text.encode("latin1" if encoding == "latin1" else "utf-8")


_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_of_dtype,
    ("torch._utils", "_rebuild_parameter"): _first,
    ("torch._utils", "_rebuild_parameter_with_state"): _first,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
    ("torch.nn.parameter", "Parameter"): _first,
    ("torch", "Size"): tuple,
    ("torch", "device"): _first,
    ("torch.serialization", "_get_layout"): _first,
    ("_codecs", "encode"): _encode,
    ("builtins", "set"): set,
}
