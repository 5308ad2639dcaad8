"""Text from ids, one id at a time: the pieces join to exactly what decoding all ids at once gives."""

import codecs
import json
import re
from collections.abc import Callable
from typing import Protocol

import tokenizers

from maga_transformer.tokenizer.bytelevel import bytes_of

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class DecodeStream(Protocol):
    def step(self, token: int) -> str | None:
        """The text that has become certain with this id, or None while a character is incomplete."""
        ...

    def finish(self) -> str:
        """What is still held back; U+FFFD for bytes that never became a character."""
        ...


class Decoder:
    """What a tokenizer's decoder does, told from its description, and the tokens that it may drop."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.special = frozenset(token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special)
        self.byte_level = self.blank = self.byte_tokens = False
        self.strip = 0
        self._bytes: dict[int, bytes | None] = {}
        description = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
        steps = description.get("decoders", [description])
        kinds = [step.get("type") for step in steps]
        if kinds == ["ByteLevel"]:
            self.byte_level = True
        elif "Fuse" in kinds and all(_is_sentencepiece(step) for step in steps):
            self.blank, self.byte_tokens = "Replace" in kinds, "ByteFallback" in kinds
            self.strip = sum(step["start"] for step in steps if step["type"] == "Strip")

    def stream(self, skipped: frozenset[int]) -> DecodeStream:
        """`skipped`: ids that decoding leaves out."""
        if self.byte_level:
            return _ByteLevelStream(self, skipped)
        if self.blank or self.byte_tokens:
            return _SentencePieceStream(self, skipped)
        return WindowStream(lambda ids: self._tokenizer.decode(ids, skip_special_tokens=False), skipped)

    def token(self, token: int) -> str | None:
        return self._tokenizer.id_to_token(token)

    def byte_level_bytes(self, token: int) -> bytes | None:
        """Of a byte-level tokenizer. Kept: every stream asks at every token."""
        known = self._bytes.get(token, b"")
        if known == b"":
            text = self.token(token)
            known = self._bytes[token] = None if text is None else bytes_of(text)
        return known

    def token_bytes(self, token: int) -> bytes:
        """The bytes that an id adds to the text when nothing is left out."""
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        if self.byte_level:
            return bytes_of(text)
        if self.byte_tokens and (match := _BYTE_TOKEN.fullmatch(text)):
            return bytes([int(match[1], 16)])
        return (text.replace("▁", " ") if self.blank else text).encode("utf-8")


def _is_sentencepiece(step: dict[str, object]) -> bool:
    kind = step["type"]
    if kind == "Replace":
        return step.get("pattern") == {"String": "▁"} and step.get("content") == " "
    if kind == "Strip":
        return step.get("content") == " " and step.get("stop") == 0
    return kind in ("ByteFallback", "Fuse")


class _ByteLevelStream:
    def __init__(self, decoder: Decoder, skipped: frozenset[int]) -> None:
        self._decoder, self._skipped = decoder, skipped
        self._utf8: Callable[..., str] = codecs.getincrementaldecoder("utf-8")("replace").decode

    def step(self, token: int) -> str | None:
        data = None if token in self._skipped else self._decoder.byte_level_bytes(token)
        return (self._utf8(data) or None) if data else None

    def finish(self) -> str:
        return self._utf8(b"", True)


class _SentencePieceStream:
    """A run of byte tokens is a text only as a whole, so it is held until another token follows."""

    def __init__(self, decoder: Decoder, skipped: frozenset[int]) -> None:
        self._decoder, self._skipped = decoder, skipped
        self._held = bytearray()
        self._strip = decoder.strip  # blanks still to be dropped from the very beginning

    def step(self, token: int) -> str | None:
        text = None if token in self._skipped else self._decoder.token(token)
        if text is None:
            return None
        match = _BYTE_TOKEN.fullmatch(text) if self._decoder.byte_tokens else None
        if match:
            self._held.append(int(match[1], 16))
            return None
        return self._start(self._release() + (text.replace("▁", " ") if self._decoder.blank else text)) or None

    def finish(self) -> str:
        return self._start(self._release())

    def _release(self) -> str:
        held, self._held = bytes(self._held), bytearray()
        try:
            return held.decode("utf-8")
        except UnicodeDecodeError:
            return "\ufffd" * len(held)

    def _start(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text, self._strip = text[1:], self._strip - 1
        return text


class WindowStream:
    """Any other decoder: decodes a short window twice, and emits what the newest id added once no character is incomplete."""

    def __init__(self, decode: Callable[[list[int]], str], skipped: frozenset[int]) -> None:
        self._decode, self._skipped = decode, skipped
        self._ids: list[int] = []
        self._prefix = self._read = 0

    def step(self, token: int) -> str | None:
        if token in self._skipped:
            return None
        self._ids.append(token)
        text = self._new_text()
        if not text or text.endswith("\ufffd"):
            return None
        self._prefix, self._read = self._read, len(self._ids)
        return text

    def finish(self) -> str:
        return self._new_text()

    def _new_text(self) -> str:
        before = self._decode(self._ids[self._prefix : self._read])
        return self._decode(self._ids[self._prefix :])[len(before) :]
