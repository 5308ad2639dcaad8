"""Text to token ids, long texts off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from maga_transformer.request import Fault, RequestError, long_prompt
from maga_transformer.server.state import State
from maga_transformer.structured import Compiled, Grammar

if TYPE_CHECKING:
    from maga_transformer.tokenizer import Tokenizer

Result = TypeVar("Result")
_INLINE_CHARACTERS = 8192  # tokenised in about a millisecond
_PIECE = 1 << 16  # characters
_MOST_TOKENS = 1 << 20  # of a text that is cut or counted


async def off_loop(state: State, characters: int, work: Callable[[], Result]) -> Result:
    if characters <= _INLINE_CHARACTERS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(state.tokenising, work)


async def encode_text(
    state: State, text: str, *, add_special_tokens: bool = True, field: str = "prompt", whole: bool = False
) -> list[int]:
    """`whole`: it must fit into the context as it is."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(Fault.parameter, f"{field}: a lone surrogate is no character", field) from None
    tokenizer, context = state.runtime.tokenizer, state.runtime.description.context

    def encode() -> list[int]:
        if len(text) > _PIECE:
            _refuse_endless(tokenizer, text, context if whole else max(context, _MOST_TOKENS))
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    return await off_loop(state, len(text), encode)


def _refuse_endless(tokenizer: Tokenizer, text: str, most: int) -> None:
    """A token takes some hundred bytes while it is found. So a long text is counted first, a piece at a time; where a piece ends
    other tokens may come up than in the whole text, but not many."""
    counted, pieces, at = 0, 0, 0
    while at < len(text):
        blank = text.rfind(" ", at + _PIECE // 2, at + _PIECE)
        end = blank if blank > 0 and at + _PIECE < len(text) else at + _PIECE
        counted += len(tokenizer.encode(text[at:end], add_special_tokens=False))
        pieces, at = pieces + 1, end
    if counted - 64 * pieces > most:
        raise long_prompt(most, counted)


async def compiled(state: State, grammar: Grammar | None) -> Compiled | None:
    """Off the event loop: a large grammar takes a moment, and the first one prepares the vocabulary."""
    if grammar is None:
        return None
    return await asyncio.get_running_loop().run_in_executor(state.tokenising, state.runtime.grammars.compile, grammar)
