"""What OpenAI's chat and completion answers look like, whole and in chunks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from maga_transformer.server.logprobs import CompletionLogprobs, chat_logprobs
from maga_transformer.server.state import State


class Shape(ABC):
    """What differs between chat and completions."""

    prefix = ""
    name = ""
    chunk_name = ""

    def __init__(self, state: State, model: str) -> None:
        self.token_bytes = state.runtime.token_bytes
        self.id = f"{self.prefix}-{uuid4().hex}"
        self._model = model
        self._created = int(time.time())

    def envelope(self, name: str, choices: list[Any]) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self._created, "model": self._model, "choices": choices}

    @abstractmethod
    def choice(self, index: int, text: str, logprobs: Any) -> dict[str, Any]:
        """Of a whole answer."""

    @abstractmethod
    def chunk(self, text: str, logprobs: Any) -> dict[str, Any]:
        """Of a stream."""

    @abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """A choice's first chunk, before any text."""

    @abstractmethod
    def logprobs(self, index: int, tokens: Sequence[int], logprobs: Sequence[Any]) -> dict[str, Any]:
        """Of the tokens that a piece of text came from."""


class ChatShape(Shape):
    prefix, name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, text: str, logprobs: Any) -> dict[str, Any]:
        return {"index": index, "message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": logprobs}

    def chunk(self, text: str, logprobs: Any) -> dict[str, Any]:
        return {"delta": {"content": text} if text or logprobs else {}, "logprobs": logprobs}

    def opening(self, index: int) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def logprobs(self, index: int, tokens: Sequence[int], logprobs: Sequence[Any]) -> dict[str, Any]:
        return chat_logprobs(self.token_bytes, tokens, logprobs)


class CompletionShape(Shape):
    prefix, name, chunk_name = "cmpl", "text_completion", "text_completion"

    def __init__(self, state: State, model: str, sequences: int, echo: Sequence[str]) -> None:
        """`sequences`: choices of each prompt; `echo`: each prompt's text, or nothing."""
        super().__init__(state, model)
        self._sequences = sequences
        self._echo = echo
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def choice(self, index: int, text: str, logprobs: Any) -> dict[str, Any]:
        return {"index": index, "text": self._echoed(index) + text, "logprobs": logprobs}

    def chunk(self, text: str, logprobs: Any) -> dict[str, Any]:
        return {"text": text, "logprobs": logprobs}

    def opening(self, index: int) -> dict[str, Any] | None:
        echoed = self._echoed(index)
        return {"text": echoed, "logprobs": None} if echoed else None

    def logprobs(self, index: int, tokens: Sequence[int], logprobs: Sequence[Any]) -> dict[str, Any]:
        if index not in self._logprobs:
            self._logprobs[index] = CompletionLogprobs(self.token_bytes)
        return self._logprobs[index].take(tokens, logprobs)

    def _echoed(self, index: int) -> str:
        return self._echo[index // self._sequences] if self._echo else ""
