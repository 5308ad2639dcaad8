"""gpt-oss's markup: every message names its channel, and a call its recipient, in a header of its own."""

from __future__ import annotations

import re

from maga_transformer.chat.pieces import Calls, Piece, Reasoning, Text, first_marker, held_suffix

MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
_ENDS = ("<|start|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([A-Za-z0-9_.\-]+)")


class HarmonyReader:
    """analysis is a thought, final the answer, commentary to=functions.NAME a call."""

    def __init__(self, most: int | None = None) -> None:
        self._calls = Calls(most)
        self._held = ""
        self._header: str | None = ""  # None: in the body of a message
        self._kind = "text"
        self.thinking = False

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._held:
            markers = ("<|message|>",) if self._header is not None else _ENDS
            found = first_marker(self._held, markers)
            keep = held_suffix(self._held, markers) if found is None else 0
            end = len(self._held) - keep if found is None else found[0]
            part, self._held = self._held[:end], self._held[end:]
            if self._header is None:
                pieces += self._body(part)
            else:
                self._header += part
            if found is None:
                break
            self._held = self._held[len(found[1]) :]
            if self._header is None:
                self._header = found[1] if found[1] == "<|channel|>" else ""
            else:
                pieces += self._begin(self._header)
                self._header = None
        return pieces

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        if self._header is None:
            return self._body(held)
        header = self._header + held
        return [] if not header.strip() or "<|" in header else [Text(header)]  # an answer without any markup

    def _begin(self, header: str) -> list[Piece]:
        recipient = _RECIPIENT.search(header)
        self._kind = "call" if recipient else "thought" if "analysis" in header else "text"
        self.thinking = self._kind == "thought"
        return self._calls.begin(recipient[1]) if recipient else []

    def _body(self, text: str) -> list[Piece]:
        if not text:
            return []
        if self._kind == "call":
            return self._calls.arguments(text)
        return [Reasoning(text)] if self._kind == "thought" else [Text(text)]
