"""What a reader makes of an answer, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol
from uuid import uuid4


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class CallBegin:
    """Of the `index`-th tool call of the answer. Its arguments follow as JSON text, in one or many pieces."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    index: int
    text: str


Piece = Text | Reasoning | CallBegin | CallArguments


class Reader(Protocol):
    """Of one answer. Text is held back only while it may turn out to be markup."""

    def push(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]:
        """What was held back: the answer has ended."""
        ...


class PlainReader:
    def push(self, text: str) -> list[Piece]:
        return [Text(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


class Calls:
    """Numbers the calls of an answer. `most` None: any number; further ones are dropped."""

    def __init__(self, most: int | None = None) -> None:
        self.count = 0
        self._most = most

    def begin(self, name: str) -> list[Piece]:
        self.count += 1
        if self._dropped:
            return []
        return [CallBegin(self.count - 1, f"call_{uuid4().hex[:24]}", name)]

    def arguments(self, text: str) -> list[Piece]:
        """Of the newest call."""
        return [] if self._dropped or not text else [CallArguments(self.count - 1, text)]

    @property
    def _dropped(self) -> bool:
        return self._most is not None and self.count > self._most


def held_suffix(text: str, markers: tuple[str, ...]) -> int:
    """How many of the last characters are the beginning of one of the markers."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest


def first_marker(text: str, markers: tuple[str, ...]) -> tuple[int, str] | None:
    """Where the first of them stands; the longest of those that begin there."""
    found = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker)) >= 0]
    if not found:
        return None
    at, _, marker = min(found)
    return at, marker
