"""Files that torch.save writes, without torch: the zip of today and the older stream, with tensors mapped in place."""

import io
import mmap
import struct
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from maga_transformer.checkpoint.files import map_file
from maga_transformer.checkpoint.torch_pickle import ElementType, PickledTensor, Storage, check_opcodes, read_pickle

_STREAM_MAGIC, _STREAM_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, bytes of the name, bytes of the extra field
_MAX_DEPTH = 16  # of dictionaries inside dictionaries
_MAX_TENSORS = 1 << 20


class TorchFile:
    """One mapped file. `content`: what was saved, with a PickledTensor for each tensor. ValueError names the file."""

    def __init__(self, path: str, *, inert: bool = False, inside: tuple[mmap.mmap, int, int] | None = None) -> None:
        """`inert`: a training checkpoint may name classes of the program that wrote it; they are read as Inert objects. `inside`:
        the file is a part of a mapped one, whose name is `path`: the map, first byte and number of bytes."""
        self.path = path
        self._map, self._begin, self._size = inside or _whole(path)
        self._inert = inert
        self._storages: dict[str, Storage] = {}
        head = self._map[self._begin : self._begin + 4]
        if head == b"PK\x03\x04":
            self.content = self._read_zip()
        elif head[:1] == b"\x80" and inside is None:
            self.content = self._read_stream()
        elif self._map[257:262] == b"ustar":
            raise ValueError(f"{path}: the tar format of torch before 0.1.10 is not supported; load and save it with a newer torch")
        else:
            raise ValueError(f"{path}: not a file of torch.save (it begins with {head!r})")

    def tensor(self, tensor: PickledTensor) -> npt.NDArray[Any]:
        """A read-only view of the file."""
        item = tensor.element.numpy.itemsize
        begin = tensor.storage.begin + tensor.offset * item
        if 0 in tensor.shape:
            return np.zeros(tensor.shape, tensor.element.numpy)
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
        flat = np.frombuffer(self._map, tensor.element.numpy, span, begin)
        strides = tuple(stride * item for stride in tensor.strides)
        return np.lib.stride_tricks.as_strided(flat, tensor.shape, strides, writeable=False)

    def _storage(self, key: str, element: ElementType, numel: int) -> Storage:
        found = self._storages.setdefault(key, Storage(key, element, numel))
        if (found.element, found.numel) != (element, numel):
            raise ValueError(f"storage {key} is named with two types or sizes")
        return found

    def _read_zip(self) -> Any:
        try:
            with zipfile.ZipFile(_Window(self._map, self._begin, self._size)) as archive:
                entries = {info.filename: info for info in archive.infolist()}
        except Exception as error:  # zipfile raises much beside BadZipFile for damaged files
            raise ValueError(f"{self.path}: a damaged or truncated zip file: {error}") from None
        roots = [name.removesuffix("data.pkl") for name in entries if name.endswith("/data.pkl")]
        if len(roots) != 1:
            raise ValueError(f"{self.path}: a zip file that torch.save did not write (no data.pkl)")
        root = roots[0]
        if f"{root}constants.pkl" in entries:
            raise ValueError(f"{self.path}: a TorchScript program, not a state dict")
        if f"{root}byteorder" in entries and self._record(entries[f"{root}byteorder"]) != b"little":
            raise ValueError(f"{self.path}: written on a big-endian machine, which is not supported")
        content = read_pickle(self._record(entries[f"{root}data.pkl"]), self.path, self._storage, inert=self._inert)
        for key, storage in self._storages.items():
            info = entries.get(f"{root}data/{key}")
            if info is None:
                raise ValueError(f"{self.path}: storage {key} is missing; truncated or damaged")
            storage.begin, size = self._extent(info)
            if size < storage.nbytes:
                raise ValueError(f"{self.path}: storage {key} has {size} bytes, its tensors need {storage.nbytes}")
        return content

    def _extent(self, info: zipfile.ZipInfo) -> tuple[int, int]:
        """First byte and number of bytes of an uncompressed entry."""
        if info.compress_type != zipfile.ZIP_STORED:
            raise ValueError(
                f"{self.path}: entry {info.filename} is compressed, which torch.save does not do; unpack and zip it again"
            )
        at = self._begin + info.header_offset
        header = self._map[at : at + _LOCAL_HEADER.size]
        if len(header) == _LOCAL_HEADER.size:
            signature, name, extra = _LOCAL_HEADER.unpack(header)
            begin = at + _LOCAL_HEADER.size + name + extra
            if signature == b"PK\x03\x04" and begin + info.file_size <= self._begin + self._size:
                return begin, info.file_size
        raise ValueError(f"{self.path}: entry {info.filename} lies outside the file; truncated or damaged")

    def _record(self, info: zipfile.ZipInfo) -> bytes:
        begin, size = self._extent(info)
        return self._map[begin : begin + size]

    def _read_stream(self) -> Any:
        """Pickles of a magic number, a protocol version, facts about the system, the content and the keys of its storages; then
        each storage's number of elements and bytes, in that order."""
        position = 0
        parts = []
        for _ in range(5):
            end = self._pickle_end(position)
            parts.append(read_pickle(self._map[position:end], self.path, self._storage, inert=self._inert))
            position = end
        magic, protocol, system, content, keys = parts
        if (magic, protocol) != (_STREAM_MAGIC, _STREAM_PROTOCOL):
            raise ValueError(f"{self.path}: a pickle that torch.save did not write")
        if not isinstance(system, dict) or system.get("little_endian") is not True:
            raise ValueError(f"{self.path}: written on a big-endian machine, which is not supported")
        if not isinstance(keys, list) or {str(key) for key in keys} != set(self._storages):
            raise ValueError(f"{self.path}: the list of storages does not match the tensors; damaged")
        for key in keys:
            storage = self._storages[str(key)]
            storage.begin = position + 8
            position = storage.begin + storage.nbytes
            if position > len(self._map):
                raise ValueError(
                    f"{self.path}: storage {key} ends at byte {position}, the file has {len(self._map)} bytes; truncated?"
                )
            if int.from_bytes(self._map[storage.begin - 8 : storage.begin], "little") != storage.numel:
                raise ValueError(f"{self.path}: storage {key} does not have the {storage.numel} elements that its tensors need")
        return content

    def _pickle_end(self, begin: int) -> int:
        view = _Tail(self._map, begin)
        try:
            check_opcodes(view)
        except Exception as error:  # pickletools raises ValueError and what the decoders of arguments raise
            raise ValueError(f"{self.path}: the pickle at byte {begin} is damaged or truncated: {error}") from None
        return view.tell()


def _whole(path: str) -> tuple[mmap.mmap, int, int]:
    data = map_file(path)
    return data, 0, len(data)


class _Window(io.RawIOBase):
    """A part of a mapped file, as zipfile reads it."""

    def __init__(self, data: mmap.mmap, begin: int, size: int) -> None:
        self._data, self._begin, self._size, self._position = data, begin, size, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = max(0, offset + (0, self._position, self._size)[whence])
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._size - self._position)
        count = left if size is None or size < 0 else min(size, left)
        taken = self._data[self._begin + self._position : self._begin + self._position + count]
        self._position += count
        return taken


class _Tail:
    """The mapped file from a position on, as pickletools reads it."""

    def __init__(self, data: mmap.mmap, begin: int) -> None:
        self._data, self._position = data, begin

    def read(self, size: int) -> bytes:
        taken = self._data[self._position : self._position + size]
        self._position += len(taken)
        return taken

    def readline(self) -> bytes:
        end = self._data.find(b"\n", self._position)
        return self.read((len(self._data) if end < 0 else end + 1) - self._position)

    def tell(self) -> int:
        return self._position


def tensors_of(content: Any, path: str) -> dict[str, PickledTensor]:
    """The tensors of nested dictionaries, their keys joined by dots; other values are left out."""
    found: dict[str, PickledTensor] = {}

    def walk(value: Any, prefix: str, depth: int) -> Iterator[tuple[str, PickledTensor]]:
        if isinstance(value, PickledTensor):
            yield prefix, value
        elif isinstance(value, Mapping):
            if depth == _MAX_DEPTH:
                raise ValueError(f"{path}: {prefix} nests dictionaries too deep")
            for key, item in value.items():
                yield from walk(item, f"{prefix}.{key}" if prefix else str(key), depth + 1)

    for name, tensor in walk(content, "", 0):
        if name in found or len(found) == _MAX_TENSORS:
            raise ValueError(f"{path}: tensor {name} appears twice, or there are more tensors than any model has")
        found[name] = tensor
    return found
