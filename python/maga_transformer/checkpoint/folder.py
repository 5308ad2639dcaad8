"""Hugging Face folders: config.json beside one file of tensors, or shards that an index lists."""

import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy.typing as npt

from maga_transformer.checkpoint.files import read_json_object, release


class Entry(Protocol):
    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...


class TensorFile(Protocol):
    path: str

    @property
    def entries(self) -> Mapping[str, Entry]: ...

    def tensor(self, name: str) -> npt.NDArray[Any]: ...


class FolderCheckpoint:
    """A Checkpoint of whatever files `open_file` reads: those of the `index` where it exists, else of `unindexed(folder)`."""

    def __init__(
        self, path: str, open_file: Callable[[str], TensorFile], *, index: str, unindexed: Callable[[str], list[str]]
    ) -> None:
        self.path = path
        self.config: dict[str, Any] = read_json_object(os.path.join(path, "config.json"))
        self._open_file = open_file
        self._files: dict[str, TensorFile] = {}  # tensor name -> its file
        if os.path.exists(os.path.join(path, index)):
            self._read_index(index)
        else:
            self._read_files(unindexed(path))

    def _read_files(self, paths: list[str]) -> None:
        for path in paths:
            file = self._open_file(path)
            for name in file.entries:
                if name in self._files:
                    raise ValueError(f"{path}: tensor {name} is also in {self._files[name].path}")
                self._files[name] = file

    def _read_index(self, name_of_index: str) -> None:
        index = os.path.join(self.path, name_of_index)
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ValueError(f"{index}: weight_map is not an object of tensor names and file names")
        for shard in sorted(set(weight_map.values())):
            path = os.path.join(self.path, shard)
            if os.path.basename(shard) != shard:
                raise ValueError(f"{index}: shard {shard!r} is not a file name of this folder")
            if not os.path.isfile(path):
                raise FileNotFoundError(f"{path}: this shard is named by {name_of_index} but missing")
        self._read_files([os.path.join(self.path, shard) for shard in sorted(set(weight_map.values()))])
        for name, shard in weight_map.items():
            if name not in self._files or os.path.basename(self._files[name].path) != shard:
                raise ValueError(f"{os.path.join(self.path, shard)}: tensor {name} is not in the shard that {name_of_index} names")
        for name, file in self._files.items():
            if name not in weight_map:
                raise ValueError(f"{file.path}: tensor {name} is not listed in {name_of_index}")

    def _entry(self, name: str) -> Entry:
        return self._file(name).entries[name]

    def _file(self, name: str) -> TensorFile:
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
        return self._entry(name).nbytes

    def file(self, name: str) -> str:
        return self._file(name).path

    def tensor(self, name: str) -> npt.NDArray[Any]:
        return self._file(name).tensor(name)

    def release(self, name: str) -> None:
        release(self.tensor(name))

    def close(self) -> None:
        self._files.clear()
