"""Read-only mapped files and strict JSON, with errors that name the file."""

import json
import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt


def map_file(path: str) -> mmap.mmap:
    """Maps a file that has at least one byte. Arrays over the map keep it alive after its owner lets go of it."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            raise ValueError(f"{path}: the file is empty")
        head = file.read(24)
        if head.lstrip().lower().startswith((b"<!doctype html", b"<html")):
            raise ValueError(f"{path}: this is an HTML page, not the weights; fetch the file itself, not the page about it")
        if head.startswith(b"version https://git-lfs"):
            raise ValueError(f"{path}: this is a Git LFS pointer, not the weights; run `git lfs pull`")
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)


def release(values: npt.NDArray[Any]) -> None:
    """Lets the system take back the memory that a part of a mapped file came into; touched again, it is read from the file anew.
    Arrays over other memory stay as they are."""
    owner: Any = values
    while owner is not None and not isinstance(owner, mmap.mmap):
        owner = owner.obj if isinstance(owner, memoryview) else getattr(owner, "base", None)
    if owner is None or not values.size or not hasattr(mmap, "MADV_DONTNEED"):
        return
    span = values.itemsize + sum((size - 1) * stride for size, stride in zip(values.shape, values.strides, strict=True))
    begin = _address(values) - _address(np.frombuffer(owner, np.uint8, 1))
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE  # pages that others share stay
    end = (begin + span) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > first:
        owner.madvise(mmap.MADV_DONTNEED, first, end - first)


def _address(values: npt.NDArray[Any]) -> int:
    address: int = values.__array_interface__["data"][0]
    return address


def parse_json_object(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object without duplicate keys; `where` opens the message of every error."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"duplicate key {key!r}")
            found[key] = value
        return found

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def read_json_object(path: str) -> dict[str, Any]:
    with open(path, "rb") as file:
        return parse_json_object(file.read(), path)


def is_count(value: object) -> bool:
    """A JSON number that can be a size: an integer from 0, and no boolean."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
