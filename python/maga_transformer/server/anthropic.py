"""Anthropic's routes: /v1/messages and /v1/messages/count_tokens, on the model's own chat template."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from maga_transformer.chat.pieces import CallArguments, CallBegin, Piece, Reasoning, Text
from maga_transformer.output import Delta
from maga_transformer.request import Job
from maga_transformer.server.anthropic_request import MessagesRequest, conversation, parse
from maga_transformer.server.body import json_object
from maga_transformer.server.chat import ChatPrompt, render_chat, template_header
from maga_transformer.server.errors import anthropic_error, encode
from maga_transformer.server.generation import Generation
from maga_transformer.server.openai import model_of
from maga_transformer.server.prompts import compiled
from maga_transformer.server.reading import Reading
from maga_transformer.server.state import State
from maga_transformer.server.streaming import EventStream, named_event, unless_gone


async def messages(request: Request) -> Response:
    """Answers a conversation in Anthropic's shape, whole or as its events."""
    state = State.of(request)
    asked = parse(await json_object(request, state.body_limit), for_answer=True)
    model = model_of(state, asked.model)
    prompt = await render_chat(state, conversation(asked))
    job = Job(
        prompt=prompt.ids,
        sampling=asked.sampling(state.runtime.description.sampling_defaults, prompt.visible(state)),
        grammar=await compiled(state, prompt.grammar(None)),
    )
    generation = Generation(state.runtime, [state.runtime.prepare(job)])
    answer = _Answer(generation, prompt, model, asked)
    if asked.stream:
        return EventStream(
            answer.events(),
            lambda error: named_event("error", anthropic_error(error)),
            on_close=generation.cancel,
            keep_alive=True,
            headers=template_header(prompt),
        )
    with generation:
        whole = await unless_gone(request, answer.whole())
    return Response(encode(whole), headers=template_header(prompt), media_type="application/json")


async def count_tokens(request: Request) -> Response:
    """Tokens of the prompt that a conversation becomes."""
    state = State.of(request)
    asked = parse(await json_object(request, state.body_limit), for_answer=False)
    model_of(state, asked.model)
    prompt = await render_chat(state, conversation(asked))
    return Response(encode({"input_tokens": len(prompt.ids)}), media_type="application/json")


class _Answer:
    def __init__(self, generation: Generation, prompt: ChatPrompt, model: str, asked: MessagesRequest) -> None:
        self._generation = generation
        self._reading = Reading(prompt)
        self._model = model
        self._asked = asked
        self._id = f"msg_{uuid4().hex}"
        self._blocks = 0  # that have begun
        self._open: str | None = None  # the kind of the block that has not ended

    async def whole(self) -> dict[str, Any]:
        stop = None
        async for deltas in self._generation.deltas():
            for delta in deltas:
                self._reading.take(0, delta)
                stop = delta.stop
        read = self._reading.whole(0)
        content: list[dict[str, Any]] = []
        if read.reasoning:
            content.append({"type": "thinking", "thinking": read.reasoning, "signature": ""})
        if read.text or not read.calls:
            content.append({"type": "text", "text": read.text})
        content += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": _object(arguments)} for call, arguments in read.calls
        ]
        return {**self._message(content), **self._stopped(stop), "usage": self._usage()}

    async def events(self) -> AsyncIterator[bytes]:
        started, stop = False, None
        async for deltas in self._generation.deltas():
            for delta in deltas:
                if not started:
                    started = True
                    message = {**self._message([]), "stop_reason": None, "stop_sequence": None, "usage": self._usage(0)}
                    yield named_event("message_start", {"type": "message_start", "message": message})
                async for event in self._delta_events(delta):
                    yield event
                stop = delta.stop
        if not self._blocks:
            yield self._begin("text", {"type": "text", "text": ""})
        for event in self._end():
            yield event
        yield named_event("message_delta", {"type": "message_delta", "delta": self._stopped(stop), "usage": self._usage()})
        yield named_event("message_stop", {"type": "message_stop"})

    async def _delta_events(self, delta: Delta) -> AsyncIterator[bytes]:
        for piece in self._reading.take(0, delta):
            kind, block, change = _block(piece)
            if self._open != kind or block is not None:
                for event in self._end():
                    yield event
                yield self._begin(kind, block or {})
            if change:
                yield named_event(
                    "content_block_delta", {"type": "content_block_delta", "index": self._blocks - 1, "delta": change}
                )

    def _begin(self, kind: str, block: Mapping[str, Any]) -> bytes:
        self._open = kind
        self._blocks += 1
        start = block or {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
        return named_event(
            "content_block_start", {"type": "content_block_start", "index": self._blocks - 1, "content_block": start}
        )

    def _end(self) -> list[bytes]:
        if self._open is None:
            return []
        self._open = None
        return [named_event("content_block_stop", {"type": "content_block_stop", "index": self._blocks - 1})]

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": content}

    def _stopped(self, stop: str | int | None) -> dict[str, Any]:
        by_string = isinstance(stop, str) and stop in (self._asked.stop_sequences or [])
        finish = self._generation.event(0, 0).finish
        reason = "stop_sequence" if by_string else "max_tokens" if finish == "length" else "end_turn"
        if reason == "end_turn" and self._reading.whole(0).calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": stop if by_string else None}

    def _usage(self, output: int | None = None) -> dict[str, int]:
        """Tokens found in the prefix cache count apart from the others of the prompt."""
        event = self._generation.event(0, 0)
        return {
            "input_tokens": event.prompt_tokens - event.cached_tokens,
            "cache_read_input_tokens": event.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": event.output_tokens if output is None else output,
        }


def _block(piece: Piece) -> tuple[str, dict[str, Any] | None, dict[str, Any] | None]:
    """The kind of block that a piece belongs to, the block if it begins one by itself, and what it adds."""
    if isinstance(piece, Text):
        return "text", None, {"type": "text_delta", "text": piece.text}
    if isinstance(piece, Reasoning):
        return "thinking", None, {"type": "thinking_delta", "thinking": piece.text}
    if isinstance(piece, CallBegin):
        return "tool_use", {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}, None
    assert isinstance(piece, CallArguments)
    return "tool_use", None, {"type": "input_json_delta", "partial_json": piece.text}


def _object(arguments: str) -> Any:
    import orjson

    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
