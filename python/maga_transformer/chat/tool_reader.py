"""Tool calls out of an answer while it streams."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from maga_transformer.chat.json_call import HeadedCall, WrappedCall
from maga_transformer.chat.pieces import Calls, Piece, Text, first_marker, held_suffix
from maga_transformer.chat.tool_formats import ToolFormat

_PYTHON_TAG = "<|python_tag|>"


class ToolReader:
    """`schemas`: of the tools that were offered. `most`: calls that are passed on."""

    def __init__(self, form: ToolFormat, schemas: Mapping[str, Mapping[str, Any]], most: int | None = None) -> None:
        self._form = form
        self._schemas = schemas
        self._calls = Calls(most)
        self._held = ""  # text that may be the beginning of a marker
        self._inside = False  # between the markers
        self._body = ""  # inside, what belongs to no call yet
        self._call: HeadedCall | WrappedCall | None = None
        self._blank = ""  # white space behind a call, which is text only if text follows
        self._started = False  # the answer has begun with something that is no white space

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._held:
            before, inside = len(self._held), self._inside
            pieces += self._in_calls() if self._inside else self._in_text()
            if len(self._held) == before and self._inside == inside:
                break
        return pieces

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._inside and self._form.read and (self._body or self._held):
            pieces += self._read_whole(self._body + self._held)
            self._body = self._held = ""
        left = self._body + (self._call.unfinished() if isinstance(self._call, WrappedCall) else "")
        text, self._held = self._held, ""
        if self._inside and (self._calls.count or not (left + text).strip()):
            return pieces
        return pieces + self._text((self._form.open if self._inside else "") + left + text)

    def _in_text(self) -> list[Piece]:
        if not self._form.open:
            return self._maybe_bare()
        found = first_marker(self._held, (self._form.open,))
        if found is None:
            keep = held_suffix(self._held, (self._form.open,))
            text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
            return self._text(text)
        at, marker = found
        text, self._held = self._held[:at], self._held[at + len(marker) :]
        self._inside, self._body = True, ""
        if not text.strip():  # white space before a call is no text
            return []
        return self._text(text)

    def _maybe_bare(self) -> list[Piece]:
        """A format without a marker: only an answer that begins with a brace can be calls."""
        if not self._started:
            text = self._held.lstrip()
            if not text or _PYTHON_TAG.startswith(text):
                return []
            self._started = True
            text = text.removeprefix(_PYTHON_TAG).lstrip()
            if text.startswith("{"):
                self._held, self._inside = text, True
                return []
        text, self._held = self._held, ""
        return self._text(text)

    def _in_calls(self) -> list[Piece]:
        if self._call is not None:
            return self._continue_call()
        if self._form.read is not None:
            return self._until_close()
        marker = first_marker(self._held, ("{", self._form.close) if self._form.close else ("{",))
        if marker is None:
            keep = held_suffix(self._held, self._form.markers)
            self._body += self._held[: len(self._held) - keep]
            self._held = self._held[len(self._held) - keep :]
            return []
        at, what = marker
        header, self._held = self._body + self._held[:at], self._held[at:]
        self._body = ""
        if what == "{":
            return self._begin(header)
        self._held = self._held[len(what) :]
        self._inside = False
        return []

    def _begin(self, header: str) -> list[Piece]:
        if self._form.header is None:
            known = frozenset(self._schemas) if not self._form.open else None
            self._call = WrappedCall(self._calls, known)
        else:
            names = self._form.header.findall(header)
            if not names:  # a brace that belongs to no call
                self._inside = False
                return self._text(self._form.open + header)
            self._call = HeadedCall(self._calls, names[-1])
        return self._continue_call()

    def _continue_call(self) -> list[Piece]:
        assert self._call is not None
        pieces, self._held = self._call.push(self._held)
        if self._call.done:
            failed, self._call = self._call.failed, None
            if failed:
                self._inside = False
                pieces += self._text(self._form.open + failed)
        return pieces

    def _until_close(self) -> list[Piece]:
        found = first_marker(self._held, (self._form.close,))
        if found is None:
            keep = held_suffix(self._held, (self._form.close,))
            self._body += self._held[: len(self._held) - keep]
            self._held = self._held[len(self._held) - keep :]
            return []
        at, marker = found
        body, self._held = self._body + self._held[:at], self._held[at + len(marker) :]
        self._inside, self._body = False, ""
        return self._read_whole(body)

    def _read_whole(self, body: str) -> list[Piece]:
        assert self._form.read is not None
        call = self._form.read(body, self._schemas)
        if call is None:
            return self._text(self._form.open + body + self._form.close)
        name, arguments = call
        return self._calls.begin(name) + self._calls.arguments(json.dumps(arguments, ensure_ascii=False))

    def _text(self, text: str) -> list[Piece]:
        if self._calls.count:
            text = self._blank + text
            self._blank = ""
            if not text.strip():
                self._blank = text
                return []
        return [Text(text)] if text else []
