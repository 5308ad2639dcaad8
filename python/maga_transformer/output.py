"""From a sequence's tokens to its text: only whole characters, nothing that may turn out to be a stop word, joined deltas equal
to the decoded whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from maga_transformer.request import Sampling

if TYPE_CHECKING:
    from maga_transformer._core import Event
    from maga_transformer.tokenizer import Tokenizer


@dataclass(slots=True)
class Delta:
    """News of one sequence of one job: its event, and the text that became certain with it."""

    job: int
    event: Event
    text: str
    stop: str | int | None = None  # the stop string or stop token id that ended the output (never an end-of-text token)


class SequenceText:
    """Feed it a sequence's events in order; `text` is all that was released."""

    def __init__(self, tokenizer: Tokenizer, sampling: Sampling) -> None:
        self.text = ""
        self.tokens: list[int] = []
        self.stop: str | int | None = None
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._stream = tokenizer.decode_stream(sampling.skip_special_tokens, sampling.keep_special)
        self._decoded = 0  # tokens that went through the stream
        self._pending = ""

    def push(self, event: Event) -> str:
        """The text that this event makes certain."""
        self.tokens += event.tokens
        if event.finish:
            whole = self._whole(event)
            delta = whole[len(self.text) :] if whole.startswith(self.text) else self._pending
        else:
            held = self._held_tokens() if self._sampling.stop_words else 0
            for token in self.tokens[self._decoded : len(self.tokens) - held]:
                self._pending += self._stream.step(token) or ""
                self._decoded += 1
            hold = self._held_characters() if self._sampling.stop_strings else 0
            delta = self._pending[: len(self._pending) - hold]
            self._pending = self._pending[len(delta) :]
        self.text += delta
        return delta

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, self._sampling.skip_special_tokens, self._sampling.keep_special)

    def _whole(self, event: Event) -> str:
        """The final text. A sequence that ends at a token limit loses nothing; one that ends at a stop word loses that."""
        hidden = 0
        if event.stop_token >= 0:
            if event.stop_token in self._sampling.stop_token_ids:
                self.stop = event.stop_token
            hidden = 1
        elif event.stop_word >= 0:
            word = self._sampling.stop_words[event.stop_word]
            self.stop = self._decode(word)
            hidden = len(word)
        if self._sampling.keep_stop:
            hidden = 0
        text = self._decode(self.tokens[: len(self.tokens) - hidden])
        return self._cut_stop_string(text, event) if event.stop_string >= 0 else text

    def _cut_stop_string(self, text: str, event: Event) -> str:
        """The match ends inside the event's tokens, so an earlier occurrence (allowed by min_new_tokens) does not count."""
        stops = self._sampling.stop_strings
        self.stop = stops[event.stop_string]
        before = len(self._decode(self.tokens[: len(self.tokens) - max(1, len(event.tokens))]).rstrip("\ufffd"))
        found = [(at, stop) for stop in stops if (at := text.find(stop, max(0, before - len(stop) + 1))) >= 0]
        if not found:
            return self._cut_special(self.stop)
        at, self.stop = min(found, key=lambda match: match[0])
        return text[: at + len(self.stop)] if self._sampling.keep_stop else text[:at]

    def _cut_special(self, stop: str) -> str:
        """Of a stop string that is made of special tokens, at least in part, which the text leaves out."""
        spelt = self._tokenizer.decode(self.tokens, False)
        at, before = spelt.rfind(stop), len(self.tokens)
        while before and len(self._tokenizer.decode(self.tokens[:before], False)) > at:
            before -= 1
        rest = spelt[len(self._tokenizer.decode(self.tokens[:before], False)) : at]
        return self._decode(self.tokens[:before]) + rest + (stop if self._sampling.keep_stop else "")

    def _held_tokens(self) -> int:
        """How many of the last tokens are the beginning of a stop word."""
        held = 0
        for word in self._sampling.stop_words:
            for length in range(min(len(word) - 1, len(self.tokens)), held, -1):
                if self.tokens[-length:] == list(word[:length]):
                    held = length
                    break
        return held

    def _held_characters(self) -> int:
        """How many of the last characters are the beginning of a stop string."""
        held = 0
        for stop in self._sampling.stop_strings:
            for length in range(min(len(stop) - 1, len(self._pending)), held, -1):
                if self._pending.endswith(stop[:length]):
                    held = length
                    break
        return held
