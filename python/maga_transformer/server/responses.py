"""OpenAI's Responses API: /v1/responses, on the model's own chat template. Nothing is kept between requests."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from maga_transformer.chat.pieces import Reasoning, Text
from maga_transformer.output import Delta
from maga_transformer.request import RequestError
from maga_transformer.server.body import json_object
from maga_transformer.server.chat import ChatPrompt, render_chat, template_header
from maga_transformer.server.errors import CODES, encode
from maga_transformer.server.generation import Generation
from maga_transformer.server.logprobs import chat_logprobs
from maga_transformer.server.openai import headers, job_of, model_of
from maga_transformer.server.reading import Reading
from maga_transformer.server.responses_items import Items
from maga_transformer.server.responses_request import ResponsesRequest, conversation, parse_responses
from maga_transformer.server.state import State
from maga_transformer.server.streaming import EventStream, named_event, unless_gone


async def responses(request: Request) -> Response:
    """Answers a conversation in the shape of OpenAI's Responses API, whole or as its events."""
    state = State.of(request)
    body = await json_object(request, state.body_limit)
    asked, ignored, model, prompt = await _asked(state, body)
    job = await job_of(state, asked, prompt.ids, prompt.grammar(asked.grammar()), prompt)
    generation = Generation(state.runtime, [job])
    answer = _Answer(state, generation, prompt, asked, model)
    told = headers(ignored, len(prompt.ids) - len(job.prompt)) | template_header(prompt)
    if asked.stream:
        return EventStream(answer.events(), answer.failed, on_close=generation.cancel, keep_alive=True, headers=told)
    with generation:
        whole = await unless_gone(request, answer.whole())
    return Response(encode(whole), headers=told, media_type="application/json")


async def input_tokens(request: Request) -> Response:
    """Tokens of the prompt that a conversation becomes."""
    state = State.of(request)
    _, _, _, prompt = await _asked(state, await json_object(request, state.body_limit))
    return Response(encode({"object": "response.input_tokens", "input_tokens": len(prompt.ids)}), media_type="application/json")


async def _asked(state: State, body: Mapping[str, Any]) -> tuple[ResponsesRequest, list[str], str, ChatPrompt]:
    config = state.runtime.config
    asked, ignored = parse_responses(body, strict=config.strict)
    model = model_of(state, asked.model)
    return asked, ignored, model, await render_chat(state, conversation(asked, automatic=config.enable_auto_tool_choice))


class _Answer:
    def __init__(self, state: State, generation: Generation, prompt: ChatPrompt, asked: ResponsesRequest, model: str) -> None:
        self._generation = generation
        self._reading = Reading(prompt)
        self._prompt = prompt
        self._asked = asked
        self._model = model
        self._token_bytes = state.runtime.token_bytes
        self._tell_thoughts = bool(state.reasoning_keys)
        self._items = Items()
        self._scores: list[Any] = []  # of tokens that have not become text
        self._events = 0
        self._id = f"resp_{uuid4().hex}"
        self._created = int(time.time())

    async def whole(self) -> dict[str, Any]:
        async for _ in self._changes():
            pass
        return self._response(self._status())

    async def events(self) -> AsyncIterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event({"type": kind, "response": self._response("in_progress")})
        async for change in self._changes():
            yield self._event(change)
        status = self._status()
        yield self._event({"type": f"response.{status}", "response": self._response(status)})

    def failed(self, error: RequestError) -> bytes:
        """The last event of a stream that an error ends."""
        reason = {"code": CODES[error.fault].code, "message": error.message}
        return self._event({"type": "response.failed", "response": {**self._response("failed"), "error": reason}})

    def _event(self, payload: dict[str, Any]) -> bytes:
        self._events += 1
        return named_event(payload["type"], {**payload, "sequence_number": self._events - 1})

    async def _changes(self) -> AsyncIterator[dict[str, Any]]:
        async for deltas in self._generation.deltas():
            for delta in deltas:
                for change in self._taken(delta):
                    yield change
        if not self._items.items:
            for change in self._items.begin_message():
                yield change
        for change in self._items.end(self._status()):
            yield change

    def _taken(self, delta: Delta) -> list[dict[str, Any]]:
        changes = []
        if self._asked.logprob_count() >= 0:
            self._scores += chat_logprobs(self._token_bytes, delta.event.tokens, delta.event.logprobs)["content"]
        for piece in self._reading.take(0, delta):
            scores, self._scores = self._scores, []
            if not isinstance(piece, Reasoning) or self._tell_thoughts:
                changes += self._items.take(piece, scores if isinstance(piece, Text) else [])
        return changes

    def _status(self) -> str:
        return "incomplete" if self._generation.event(0, 0).finish == "length" else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        asked, sampling, tools = self._asked, self._generation.jobs[0].sampling, self._prompt.tools
        ended = status in ("completed", "incomplete")
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._model,
            "metadata": asked.metadata or {},
            "user": asked.user,
            "instructions": asked.instructions,
            "output": self._items.items,
            "usage": self._usage() if ended else None,
            "max_output_tokens": asked.max_output_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_logprobs": asked.top_logprobs or 0,
            "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in tools.listed],
            "tool_choice": {"type": "function", "name": tools.choice} if tools.named else tools.choice if tools.listed else "auto",
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "reasoning": {"effort": None, "summary": None, **(asked.reasoning or {})},
            "text": {"format": {"type": "text"}, **(asked.text or {})},
            "truncation": "disabled",
            "previous_response_id": None,
            "background": False,
            "store": False,
        }

    def _usage(self) -> dict[str, Any]:
        event = self._generation.event(0, 0)
        return {
            "input_tokens": event.prompt_tokens,
            "input_tokens_details": {"cached_tokens": event.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": event.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reading.reasoning_tokens},
            "total_tokens": event.prompt_tokens + event.output_tokens,
        }
