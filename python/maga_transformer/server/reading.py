"""The answers to a conversation, read apart: text, thoughts, tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from maga_transformer.chat.pieces import CallArguments, CallBegin, Piece, Reader, Reasoning, Text
from maga_transformer.output import Delta
from maga_transformer.server.chat import ChatPrompt


@dataclass
class Read:
    """So far."""

    text: str = ""
    reasoning: str = ""
    begun: list[CallBegin] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)

    @property
    def calls(self) -> list[tuple[CallBegin, str]]:
        return list(zip(self.begun, self.arguments, strict=True))

    def add(self, piece: Piece) -> None:
        if isinstance(piece, Text):
            self.text += piece.text
        elif isinstance(piece, Reasoning):
            self.reasoning += piece.text
        elif isinstance(piece, CallBegin):
            self.begun.append(piece)
            self.arguments.append("")
        elif isinstance(piece, CallArguments):
            self.arguments[piece.index] += piece.text


class Reading:
    """Of all answers to one prompt, by index."""

    def __init__(self, prompt: ChatPrompt) -> None:
        self.reasoning_tokens = 0
        self._prompt = prompt
        self._readers: dict[int, Reader] = {}
        self._read: dict[int, Read] = {}

    def take(self, index: int, delta: Delta) -> Sequence[Piece]:
        reader = self._readers.get(index)
        if reader is None:
            reader = self._readers[index] = self._prompt.reader()
        if getattr(reader, "thinking", False):
            self.reasoning_tokens += len(delta.event.tokens)
        pieces = reader.push(delta.text)
        if delta.event.finish:
            pieces = [*pieces, *reader.finish()]
        read = self.whole(index)
        for piece in pieces:
            read.add(piece)
        return pieces

    def whole(self, index: int) -> Read:
        return self._read.setdefault(index, Read())
