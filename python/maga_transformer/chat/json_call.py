"""Tool calls as JSON, read one character at a time."""

from __future__ import annotations

import json

from maga_transformer.chat.pieces import Calls, Piece

_NAME = ("name", "tool_name", "function")
_ARGUMENTS = ("arguments", "parameters", "args")


class JsonText:
    """Follows one JSON value that is an object or a list."""

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self.done = False
        self._escaped = False

    def take(self, text: str) -> int:
        """How much of the text belongs to the value."""
        for at, letter in enumerate(text):
            if self.in_string:
                if self._escaped:
                    self._escaped = False
                elif letter == "\\":
                    self._escaped = True
                elif letter == '"':
                    self.in_string = False
            elif letter == '"':
                self.in_string = True
            elif letter in "{[":
                self.depth += 1
            elif letter in "}]":
                self.depth -= 1
                if self.depth <= 0:
                    self.done = True
                    return at + 1
        return len(text)


class HeadedCall:
    """The name has been read already; the JSON object that follows is the arguments."""

    failed = ""

    def __init__(self, calls: Calls, name: str) -> None:
        self._calls = calls
        self._json = JsonText()
        self._name = name

    @property
    def done(self) -> bool:
        return self._json.done

    def push(self, text: str) -> tuple[list[Piece], str]:
        """What was read, and the rest behind the value."""
        pieces = self._calls.begin(self._name) if self._name else []
        self._name = ""
        length = self._json.take(text)
        return pieces + self._calls.arguments(text[:length]), text[length:]


class WrappedCall:
    """An object that holds the name and the arguments, in any order. Arguments are passed on as they come once the name is known.
    `names`: others make it no call; None: any name will do. The text of what turned out to be no call is in `failed`."""

    def __init__(self, calls: Calls, names: frozenset[str] | None) -> None:
        self.failed = ""
        self._calls = calls
        self._names = names
        self._json = JsonText()
        self._raw = ""  # all of it, until a call has begun
        self._key = self._value = ""
        self._expects = "key"  # at depth 1: key, colon or value
        self._begun = self._passing = False
        self._arguments: str | None = None  # None: none yet
        self._pieces: list[Piece] = []
        self._passed = ""

    @property
    def done(self) -> bool:
        return self._json.done

    def push(self, text: str) -> tuple[list[Piece], str]:
        length = len(text)
        for at, letter in enumerate(text):
            if not self._begun:
                self._raw += letter
            self._letter(letter)
            if self._json.done:
                length = at + 1
                break
        if self._json.done:
            if self._begun and self._arguments is None:
                self._passed += "{}"
            if not self._begun:
                self.failed = self._raw
        pieces = self._pieces + self._calls.arguments(self._passed)
        self._pieces, self._passed = [], ""
        return pieces, text[length:]

    def unfinished(self) -> str:
        """What was held back, should the answer end here."""
        return "" if self._begun else self._raw

    def _letter(self, letter: str) -> None:
        was_in_string, opens = self._json.in_string, self._json.depth == 0
        self._json.take(letter)
        if opens:
            return
        if self._expects == "value":
            if (letter == "," and self._json.depth == 1 and not was_in_string) or self._json.done:
                self._member_ends()
            else:
                self._in_value(letter)
        elif self._expects == "colon":
            if letter == ":":
                self._expects, self._value, self._passing = "value", "", False
        elif was_in_string and not self._json.in_string:
            self._expects = "colon"
        elif was_in_string:
            self._key += letter

    def _in_value(self, letter: str) -> None:
        outside = self._json.depth == 1 and not self._json.in_string and letter.isspace()
        if self._passing and not outside:
            self._passed += letter
            return
        if self._begun and self._arguments is None and self._key in _ARGUMENTS and letter == "{" and not self._value.strip():
            self._passing, self._arguments, self._passed = True, "", self._passed + letter
            return
        self._value += letter

    def _member_ends(self) -> None:
        key, value = self._key, self._value.strip()
        self._expects, self._key, self._value = "key", "", ""
        if self._passing:
            self._passing = False
        elif key in _NAME and not self._begun:
            self._begin(value)
        elif key in _ARGUMENTS and self._arguments is None:
            self._arguments = _object_text(value)
            if self._begun:
                self._passed += self._arguments

    def _begin(self, value: str) -> None:
        try:
            name = json.loads(value)
        except ValueError:
            return
        if not isinstance(name, str) or not name or (self._names is not None and name not in self._names):
            return
        self._begun, self._raw = True, ""
        self._pieces += self._calls.begin(name)
        self._passed += self._arguments or ""


def _object_text(value: str) -> str:
    """Some models write the arguments as a text that holds JSON."""
    if value.startswith('"'):
        try:
            inner = str(json.loads(value))
            json.loads(inner)
        except ValueError:
            return value
        return inner
    return value if value and value != "null" else "{}"
