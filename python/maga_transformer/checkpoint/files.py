"""Read-only mapped files and strict JSON, with errors that name the file."""

import json
import mmap
import os
from typing import Any


def map_file(path: str) -> mmap.mmap:
    """Maps a file that has at least one byte. Arrays over the map keep it alive after its owner lets go of it."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            raise ValueError(f"{path}: the file is empty")
        if file.read(24).startswith(b"version https://git-lfs"):
            raise ValueError(f"{path}: this is a Git LFS pointer, not the weights; run `git lfs pull`")
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)


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
