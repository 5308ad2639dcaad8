"""Text to token ids, long texts off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from maga_transformer.request import Fault, RequestError
from maga_transformer.server.state import State
from maga_transformer.structured import Compiled, Grammar

Result = TypeVar("Result")
_INLINE_CHARACTERS = 8192  # tokenised in about a millisecond


async def off_loop(state: State, characters: int, work: Callable[[], Result]) -> Result:
    if characters <= _INLINE_CHARACTERS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(state.tokenising, work)


async def encode_text(state: State, text: str, *, add_special_tokens: bool = True, field: str = "prompt") -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(Fault.parameter, f"{field}: a lone surrogate is no character", field) from None
    tokenizer = state.runtime.tokenizer
    return await off_loop(state, len(text), lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))


async def compiled(state: State, grammar: Grammar | None) -> Compiled | None:
    """Off the event loop: a large grammar takes a moment, and the first one prepares the vocabulary."""
    if grammar is None:
        return None
    return await asyncio.get_running_loop().run_in_executor(state.tokenising, state.runtime.grammars.compile, grammar)
