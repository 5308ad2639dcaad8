"""Distributed checkpoints of PyTorch (torch.distributed.checkpoint), which Megatron-Core writes as torch_dist: .metadata names the
chunks of every tensor, each a file of torch.save inside a .distcp file."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from maga_transformer.checkpoint.derived import Array, Shard
from maga_transformer.checkpoint.files import map_file
from maga_transformer.checkpoint.torch_file import TorchFile
from maga_transformer.checkpoint.torch_pickle import ElementType, Inert, PickledTensor, Storage, read_pickle

_INDEX = ".metadata"


@dataclass(frozen=True)
class _Chunk:
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    data: mmap.mmap
    path: str
    begin: int  # byte in the .distcp file
    size: int
    row: int | None = None  # the one that is wanted, of a stack

    def read(self, name: str, element: ElementType) -> Array:
        """A view of the mapped file."""
        file = TorchFile(self.path, inside=(self.data, self.begin, self.size))
        tensor = file.content
        if not isinstance(tensor, PickledTensor) or tensor.shape != self.shape or tensor.element != element:
            raise ValueError(f"{self.path}: the chunk of {name} at byte {self.begin} is not what {_INDEX} says")
        values = file.tensor(tensor)
        return values if self.row is None else values[self.row]


@dataclass(frozen=True)
class DistributedTensor:
    name: str
    element: ElementType
    shape: tuple[int, ...]
    chunks: tuple[_Chunk, ...]

    def shard(self) -> Shard:
        return self._shard(self.shape, self.chunks)

    def layer(self, i: int) -> Shard:
        """Of a stack: the chunks of other layers stay unread."""
        own = tuple(chunk for chunk in self.chunks if chunk.offsets[0] <= i < chunk.offsets[0] + chunk.shape[0])
        if not own:
            raise ValueError(f"{self.chunks[0].path}: no chunk of {self.name} holds layer {i}")
        inside = tuple(replace(chunk, offsets=chunk.offsets[1:], row=i - chunk.offsets[0]) for chunk in own)
        return self._shard(self.shape[1:], inside)

    def _shard(self, shape: tuple[int, ...], chunks: tuple[_Chunk, ...]) -> Shard:
        def parts() -> list[Array]:
            return [chunk.read(self.name, self.element) for chunk in chunks]

        def read() -> Array:
            if len(chunks) == 1:
                return parts()[0]
            values = np.empty(shape, self.element.numpy)
            for chunk, part in zip(chunks, parts(), strict=True):
                values[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, part.shape, strict=True))] = part
            return values

        return Shard(self.element.name, shape, chunks[0].path, read, parts)


def is_distributed(folder: Path) -> bool:
    return (folder / _INDEX).is_file() and any(folder.glob("*.distcp"))


def read_distributed(folder: Path) -> dict[str, DistributedTensor]:
    """Every tensor, whole, by its name. ValueError and FileNotFoundError name the file."""
    path = str(folder / _INDEX)
    metadata = _state(read_pickle((folder / _INDEX).read_bytes(), path, _no_storage, inert=True), path)
    places = {}
    for index, info in _mapping(metadata, "storage_data", path).items():
        key = _state(index, path)
        if key.get("offset") is not None:  # else it is no tensor
            places[str(key.get("fqn")), _sizes(key.get("offset"), path)] = _state(info, path)
    maps: dict[str, mmap.mmap] = {}
    found = {}
    for name, told in _mapping(metadata, "state_dict_metadata", path).items():
        state = told.state if isinstance(told, Inert) else None
        if isinstance(state, dict) and "chunks" in state:
            found[str(name)] = _tensor(str(name), state, places, folder, maps)
    return found


def _tensor(
    name: str,
    state: Mapping[str, Any],
    places: Mapping[tuple[str, tuple[int, ...]], Mapping[str, Any]],
    folder: Path,
    maps: dict[str, mmap.mmap],
) -> DistributedTensor:
    path = str(folder / _INDEX)
    properties = state.get("properties")
    properties = properties.state if isinstance(properties, Inert) else properties
    element = properties[0] if isinstance(properties, tuple) and properties else None
    shape = _sizes(state.get("size"), path)
    if not isinstance(element, ElementType) or not isinstance(state["chunks"], list):
        raise ValueError(f"{path}: tensor {name} has no type or no list of chunks")
    chunks = []
    for told in state["chunks"]:
        chunk = _state(told, path)
        offsets, sizes = _sizes(chunk.get("offsets"), path), _sizes(chunk.get("sizes"), path)
        place = places.get((name, offsets))
        fits = len(offsets) == len(sizes) == len(shape) and all(map(_fits, offsets, sizes, shape))
        if place is None or not fits:
            raise ValueError(f"{path}: the chunk of {name} at {offsets}, of {sizes}, has no place in {shape} or in a file")
        chunks.append(_chunk(name, offsets, sizes, place, folder, maps))
        if math.prod(sizes) * element.numpy.itemsize > chunks[-1].size:
            raise ValueError(f"{chunks[-1].path}: {chunks[-1].size} bytes cannot hold the chunk of {name} of shape {sizes}")
    if not chunks or 0 in shape or sum(math.prod(chunk.shape) for chunk in chunks) != math.prod(shape):
        raise ValueError(f"{path}: the chunks of tensor {name} do not make its shape {shape}")
    return DistributedTensor(name, element, shape, tuple(chunks))


def _chunk(
    name: str,
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    place: Mapping[str, Any],
    folder: Path,
    maps: dict[str, mmap.mmap],
) -> _Chunk:
    file, begin, size = (place.get(key) for key in ("relative_path", "offset", "length"))
    if not isinstance(file, str) or Path(file).name != file or not isinstance(begin, int) or not isinstance(size, int):
        raise ValueError(f"{folder / _INDEX}: the place of {name} is {file!r}, {begin!r}, {size!r}")
    path = str(folder / file)
    if path not in maps:
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{path}: {_INDEX} names this file, but it is missing")
        maps[path] = map_file(path)
    if begin < 0 or size < 0 or begin + size > len(maps[path]):
        raise ValueError(f"{path}: {name} ends at byte {begin + size}, the file has {len(maps[path])} bytes; truncated?")
    return _Chunk(offsets, sizes, maps[path], path, begin, size)


def _fits(offset: int, size: int, whole: int) -> bool:
    return offset + size <= whole


def _state(value: object, path: str) -> Mapping[str, Any]:
    """The fields of a dataclass."""
    state = value.state if isinstance(value, Inert) else None
    if not isinstance(state, dict):
        raise ValueError(f"{path}: not the index of a distributed checkpoint")
    return state


def _mapping(metadata: Mapping[str, Any], key: str, path: str) -> Mapping[Any, Any]:
    found = metadata.get(key)
    if not isinstance(found, dict):
        raise ValueError(f"{path}: has no {key}")
    return found


def _sizes(value: object, path: str) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or any(not isinstance(n, int) or n < 0 for n in value):
        raise ValueError(f"{path}: {value!r} are not sizes")
    return tuple(value)


def _no_storage(key: str, element: ElementType, numel: int) -> Storage:
    raise ValueError("an index does not hold tensors")
