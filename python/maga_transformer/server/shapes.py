"""What OpenAI's chat and completion answers look like, whole and in chunks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from maga_transformer.chat.pieces import CallArguments, CallBegin, Piece, Reasoning, Text
from maga_transformer.output import Delta
from maga_transformer.server.chat import ChatPrompt
from maga_transformer.server.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from maga_transformer.server.reading import Reading
from maga_transformer.server.state import State

Chunk = str | Mapping[str, Any]  # of a choice; a str is text and nothing else, which `Shape.text` puts into its place


class Shape(ABC):
    """What differs between chat and completions. One answer; its choices are told apart by their index."""

    prefix = ""
    name = ""
    chunk_name = ""
    reasoning_tokens = 0

    def __init__(self, state: State, model: str, *, ids_as_tokens: bool = False) -> None:
        """`ids_as_tokens`: logprobs name tokens by their ids."""
        names = [f"token_id:{token}".encode() for token in range(len(state.runtime.token_bytes))] if ids_as_tokens else None
        self.token_bytes = names or state.runtime.token_bytes
        self.id = f"{self.prefix}-{uuid4().hex}"
        self._model = model
        self._created = int(time.time())

    def envelope(self, name: str, choices: list[Any]) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self._created, "model": self._model, "choices": choices}

    @abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """A choice's first chunk, before any text."""

    @abstractmethod
    def chunks(self, index: int, delta: Delta) -> list[Chunk]:
        """What a delta adds to a choice."""

    @abstractmethod
    def text(self, text: str) -> dict[str, Any]:
        """A chunk of text."""

    @abstractmethod
    def empty(self) -> dict[str, Any]:
        """A chunk that adds no text."""

    @abstractmethod
    def choice(self, index: int, text: str) -> dict[str, Any]:
        """A whole one, after all its deltas went through `chunks`."""

    @abstractmethod
    def logprobs(self, index: int, tokens: Sequence[int], logprobs: Sequence[Any]) -> dict[str, Any]:
        """Of the tokens that a piece of text came from."""

    def prompt_logprobs(self, prompt: Sequence[int], logprobs: Sequence[Any]) -> list[Any]:
        return prompt_logprobs(self.token_bytes, prompt, logprobs)

    def echoed_logprobs(self, index: int, prompt: Sequence[int], logprobs: Sequence[Any]) -> dict[str, Any] | None:
        """Of a prompt that the answer repeats."""
        return None

    def finish(self, index: int, reason: str) -> str:
        return reason


class ChatShape(Shape):
    prefix, name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, state: State, model: str, prompt: ChatPrompt, *, include_reasoning: bool = True, ids_as_tokens: bool = False
    ) -> None:
        super().__init__(state, model, ids_as_tokens=ids_as_tokens)
        self._reading = Reading(prompt)
        self.debug_info: Mapping[str, Any] | None = None  # told once
        self._reasoning_keys = state.reasoning_keys if include_reasoning else ()

    def envelope(self, name: str, choices: list[Any]) -> dict[str, Any]:
        told, self.debug_info = self.debug_info, None
        return super().envelope(name, choices) | ({"debug_info": told} if told else {})

    @property
    def reasoning_tokens(self) -> int:  # type: ignore[override]
        return self._reading.reasoning_tokens

    def opening(self, index: int) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def empty(self) -> dict[str, Any]:
        return {"delta": {}}

    def text(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def chunks(self, index: int, delta: Delta) -> list[Chunk]:
        news = [piece.text if isinstance(piece, Text) else self._delta(piece) for piece in self._reading.take(index, delta)]
        return [chunk if isinstance(chunk, str) else {"delta": chunk} for chunk in news if chunk]

    def choice(self, index: int, text: str) -> dict[str, Any]:
        read = self._reading.whole(index)
        message: dict[str, Any] = {"role": "assistant", "content": read.text, "refusal": None}
        if read.calls:
            message["content"] = read.text or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
                for call, arguments in read.calls
            ]
        if read.reasoning:
            message |= dict.fromkeys(self._reasoning_keys, read.reasoning)
        return {"index": index, "message": message}

    def logprobs(self, index: int, tokens: Sequence[int], logprobs: Sequence[Any]) -> dict[str, Any]:
        return chat_logprobs(self.token_bytes, tokens, logprobs)

    def finish(self, index: int, reason: str) -> str:
        return "tool_calls" if reason == "stop" and self._reading.whole(index).calls else reason

    def _delta(self, piece: Piece) -> Mapping[str, Any]:
        if isinstance(piece, Reasoning):
            return dict.fromkeys(self._reasoning_keys, piece.text)
        if isinstance(piece, CallBegin):
            function = {"name": piece.name, "arguments": ""}
            return {"tool_calls": [{"index": piece.index, "id": piece.id, "type": "function", "function": function}]}
        assert isinstance(piece, CallArguments)
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}


class CompletionShape(Shape):
    prefix, name, chunk_name = "cmpl", "text_completion", "text_completion"

    def __init__(self, state: State, model: str, sequences: int, echo: Sequence[str], *, ids_as_tokens: bool = False) -> None:
        """`sequences`: choices of each prompt; `echo`: each prompt's text, or nothing."""
        super().__init__(state, model, ids_as_tokens=ids_as_tokens)
        self._sequences = sequences
        self._echo = echo
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def opening(self, index: int) -> dict[str, Any] | None:
        echoed = self._echoed(index)
        return {"text": echoed} if echoed else None

    def empty(self) -> dict[str, Any]:
        return {"text": ""}

    def text(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def chunks(self, index: int, delta: Delta) -> list[Chunk]:
        return [delta.text] if delta.text else []

    def choice(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": self._echoed(index) + text}

    def logprobs(self, index: int, tokens: Sequence[int], logprobs: Sequence[Any]) -> dict[str, Any]:
        return self._lists(index).take(tokens, logprobs)

    def echoed_logprobs(self, index: int, prompt: Sequence[int], logprobs: Sequence[Any]) -> dict[str, Any] | None:
        return self._lists(index).take_prompt(prompt, logprobs) if self._echo else None

    def _lists(self, index: int) -> CompletionLogprobs:
        if index not in self._logprobs:
            self._logprobs[index] = CompletionLogprobs(self.token_bytes)
        return self._logprobs[index]

    def _echoed(self, index: int) -> str:
        return self._echo[index // self._sequences] if self._echo else ""
