"""Checkpoints whose linears are quantised: each method says which tensors make up a linear, and reads them as a canonical form.

The wrapper shows a quantised linear as one tensor `<module>.weight` of (rows, columns), so that model families need not know."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from maga_transformer.checkpoint.files import read_json_object
from maga_transformer.checkpoint.interface import Checkpoint
from maga_transformer.formats.canonical import Canonical, widened


class Method(Protocol):
    """A way to store quantised linears. Errors name the tensor and what would be right."""

    def modules(self, checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
        """Each quantised linear, and the tensors that it is made of (a bias is none of them)."""
        ...

    def shape(self, checkpoint: Checkpoint, module: str) -> tuple[int, int]: ...

    def form(self, checkpoint: Checkpoint, module: str) -> str:
        """What two linears must have in common to be stacked."""
        ...

    def read(self, checkpoint: Checkpoint, module: str) -> Canonical: ...


class QuantizedCheckpoint:
    def __init__(self, checkpoint: Checkpoint, method: Method) -> None:
        self._checkpoint = checkpoint
        self._method = method
        self._held = threading.local()
        self.path, self.config = checkpoint.path, checkpoint.config
        self._modules = method.modules(checkpoint)
        self._parts = parts = Counter(name for tensors in self._modules.values() for name in tensors)
        missing = sorted(parts.keys() - set(checkpoint.names()))
        if missing:
            raise ValueError(f"{checkpoint.path}: tensor {missing[0]} is missing")
        self._names = [name for name in checkpoint.names() if name not in parts]
        self._names += [f"{module}.weight" for module in self._modules]

    def names(self) -> list[str]:
        return self._names

    def is_quantized(self, name: str) -> bool:
        return name.removesuffix(".weight") in self._modules and name.endswith(".weight")

    def shape(self, name: str) -> tuple[int, ...]:
        if self.is_quantized(name):
            return self._method.shape(self._checkpoint, name.removesuffix(".weight"))
        return self._checkpoint.shape(name)

    def dtype(self, name: str) -> str:
        if self.is_quantized(name):
            return self._method.form(self._checkpoint, name.removesuffix(".weight"))
        return self._checkpoint.dtype(name)

    def nbytes(self, name: str) -> int:
        if self.is_quantized(name):
            parts = self._modules[name.removesuffix(".weight")]
            return sum(self._checkpoint.nbytes(part) // self._parts[part] for part in parts)  # some share their tensors
        return self._checkpoint.nbytes(name)

    def file(self, name: str) -> str:
        if self.is_quantized(name):
            return self._checkpoint.file(self._modules[name.removesuffix(".weight")][0])
        return self._checkpoint.file(name)

    def tensor(self, name: str) -> npt.NDArray[Any]:
        if self.is_quantized(name):
            return np.asarray(self.canonical(name).dequantize())
        return self._checkpoint.tensor(name)

    def release(self, name: str) -> None:
        for part in self._modules[name.removesuffix(".weight")] if self.is_quantized(name) else (name,):
            self._checkpoint.release(part)

    def canonical(self, name: str, *, again: bool = False) -> Canonical:
        """`again`: this thread is likely to want other rows of it next, so it is kept until the thread asks for another."""
        held: tuple[str, Canonical] | None = getattr(self._held, "weight", None)
        if held is None or held[0] != name:
            self._held.weight = held = None  # before the next takes its memory
            held = name, self._method.read(self._checkpoint, name.removesuffix(".weight"))
        self._held.weight = held if again else None
        return held[1]

    def close(self) -> None:
        self._checkpoint.close()


def quantization_config(checkpoint: Checkpoint) -> tuple[str, dict[str, Any]] | None:
    """The method's name and its settings: from config.json, or from a file beside it as older tools wrote them."""
    found = checkpoint.config.get("quantization_config")
    if found is not None:
        if not isinstance(found, dict):
            raise ValueError(f"{checkpoint.path}: config key quantization_config is {found!r}, expected an object")
        return str(found.get("quant_method")), found
    for file, method, spellings in (
        ("quantize_config.json", "gptq", {}),
        ("quant_config.json", "awq", {"w_bit": "bits", "q_group_size": "group_size"}),
    ):
        place = Path(checkpoint.path) / file
        if place.is_file():
            values = read_json_object(str(place))
            return method, {spellings.get(key, key): value for key, value in values.items()}
    return None


def tensor_of(checkpoint: Checkpoint, name: str, dtypes: Iterable[str], shape: tuple[int | None, ...]) -> npt.NDArray[Any]:
    """A part's values, whose type and shape must be as said; None: any size."""
    found, dtype = checkpoint.shape(name), checkpoint.dtype(name)
    if dtype not in dtypes:
        raise ValueError(f"{checkpoint.file(name)}: tensor {name} has the type {dtype}, expected {' or '.join(dtypes)}")
    if len(found) != len(shape) or any(size is not None and size != is_ for size, is_ in zip(shape, found, strict=True)):
        wanted = "(" + ", ".join("any" if size is None else str(size) for size in shape) + ")"
        raise ValueError(f"{checkpoint.file(name)}: tensor {name} has shape {found}, expected {wanted}")
    return checkpoint.tensor(name)


def floats(checkpoint: Checkpoint, name: str, shape: tuple[int | None, ...]) -> npt.NDArray[np.float32]:
    """fp32, fp16 or bf16 values as fp32."""
    return widened(tensor_of(checkpoint, name, ("fp32", "fp16", "bf16"), shape), checkpoint.dtype(name))


def unpack(words: npt.NDArray[np.int32], bits: int, count: int) -> npt.NDArray[np.uint8]:
    """(rows, words) -> (rows, count): codes of `bits` bits, the lowest first, that may straddle words."""
    stream = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return np.ascontiguousarray(stream[:, :count])
    rows = stream.shape[0]
    if 8 % bits == 0:
        each = 8 // bits
        codes = np.empty((rows, stream.shape[1], each), np.uint8)
        for i in range(each):
            codes[:, :, i] = (stream >> (bits * i)) & ((1 << bits) - 1)
        return np.ascontiguousarray(codes.reshape(rows, -1)[:, :count])
    ones = np.unpackbits(stream, axis=1, bitorder="little")[:, : count * bits].reshape(rows, count, bits)
    return np.packbits(ones, axis=2, bitorder="little").reshape(rows, count)


def setting(checkpoint: Checkpoint, settings: dict[str, Any], key: str, valid: Iterable[Any], default: Any = None) -> Any:
    """A value of quantization_config that must be one of those that can be read."""
    value, valid = settings.get(key, default), list(valid)
    if value not in valid:
        shown = ", ".join(map(repr, valid))
        raise ValueError(f"{checkpoint.path}: quantization_config {key} is {value!r}, which is not supported (supported: {shown})")
    return value


def group_size(checkpoint: Checkpoint, settings: dict[str, Any]) -> int:
    """Columns of a group; -1: all of them."""
    value = settings.get("group_size", -1)
    if not isinstance(value, int) or isinstance(value, bool) or (value < 1 and value != -1):
        raise ValueError(
            f"{checkpoint.path}: quantization_config group_size is {value!r}, expected a positive integer, or -1 for all columns"
        )
    return value
