"""Grammars compiled against the vocabulary, the last ones kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from maga_transformer.request import Fault, RequestError
from maga_transformer.structured.grammar import Grammar, blamed

if TYPE_CHECKING:
    from maga_transformer.tokenizer import Tokenizer

_KEPT = 32  # compiled grammars


@dataclass(frozen=True)
class Compiled:
    """Copied for every output that follows it."""

    prototype: LLMatcher
    after: bytes


class Compiler:
    """Thread-safe. The vocabulary is prepared (about a second) when the first grammar comes."""

    def __init__(self, tokenizer: Tokenizer, token_bytes: Sequence[bytes]) -> None:
        self._words = tokenizer
        self._token_bytes = token_bytes
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._preparing = threading.Lock()

    def compile(self, grammar: Grammar) -> Compiled:
        """Bounded in time by the grammar's size (structured/grammar.py) and by these limits. Raises RequestError."""
        with self._lock:
            kept = self._kept.get(grammar.text)
            if kept is not None:
                self._kept.move_to_end(grammar.text)
        if kept is None:
            kept = LLMatcher(self._vocabulary(), grammar.text, log_level=0, limits=limits())
            kept.compute_bitmask()  # it looks at the grammar no earlier; outputs find this done
            error = kept.get_error()
            if error.startswith("NoExtension") or (kept.is_stopped() and not error and not kept.is_accepting()):
                raise RequestError(Fault.parameter, f"{grammar.field}: no text can satisfy it", grammar.field)
            if error:
                raise RequestError(Fault.parameter, f"{blamed(grammar, error)}: {one_line(error, 300)}", grammar.field)
            with self._lock:
                self._kept[grammar.text] = kept
                while len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
        return Compiled(kept, grammar.after.encode())

    def _vocabulary(self) -> LLTokenizer:
        with self._preparing:
            if self._tokenizer is None:
                eos = sorted(self._words.eos_ids)
                self._tokenizer = LLTokenizer(
                    TokenizerWrapper(_Vocabulary(self._words, self._token_bytes)),
                    n_vocab=self._words.vocab_size,
                    eos_token=eos or 0,
                )
            return self._tokenizer


def limits() -> LLParserLimits:
    """A mask takes some milliseconds at most, a matcher some tens of megabytes."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, token_bytes: Sequence[bytes]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eos_ids, default=0)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = list(token_bytes)
        self.special_token_ids = sorted(token for token in tokenizer.special_ids if token < tokenizer.vocab_size)

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text.decode(errors="replace") if isinstance(text, bytes) else text, add_special_tokens=False)


def one_line(message: str, most: int) -> str:
    """The first letters of a message that may quote the grammar over many lines."""
    return " ".join(message.split())[:most]
