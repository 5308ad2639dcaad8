"""Health, worker status, metrics, and the tokenizer's routes."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from maga_transformer.request import Fault, RequestError, quote
from maga_transformer.server.body import json_object
from maga_transformer.server.chat import render_chat
from maga_transformer.server.errors import encode
from maga_transformer.server.prompts import encode_text
from maga_transformer.server.state import State

STALL_SECONDS = 120.0


class StallWatch:
    """Notices an engine that has work and makes no step."""

    def __init__(self) -> None:
        self._steps = -1
        self._since = 0.0

    def stalled(self, steps: int, running: int, now: float) -> bool:
        """To be asked regularly: the time counts from the first look that saw this number of steps."""
        if not running or steps != self._steps:
            self._steps, self._since = steps, now
        return now - self._since > STALL_SECONDS


def _json(value: object, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")


async def home(request: Request) -> Response:
    return _json({"status": "home"})


async def health(request: Request) -> Response:
    state = State.of(request)
    stats = state.runtime.engine.stats()
    if state.runtime.draining:
        return _json("draining", 503)
    if stats["device_lost"]:
        return _json("the device is lost", 503)
    if state.stall_watch.stalled(stats["steps"], stats["running"], time.monotonic()):
        return _json("stalled", 503)
    return _json("ok")


async def worker_status(request: Request) -> Response:
    runtime = State.of(request).runtime
    stats = runtime.engine.stats()
    page_tokens = runtime.config.seq_size_per_block
    limit = runtime.config.concurrency_limit or runtime.config.max_num_seqs + runtime.config.max_queue
    return _json(
        {
            "alive": not runtime.draining,
            "available_concurrency": max(0, limit - runtime.in_flight),
            "onflight_requests": runtime.in_flight,
            "running": stats["running"],
            "waiting": stats["waiting"],
            "total_kv_cache": stats["pages_total"] * page_tokens,
            "available_kv_cache": (stats["pages_free"] + stats["pages_cached"]) * page_tokens,
            "iterate_count": stats["steps"],
        }
    )


async def metrics(request: Request) -> Response:
    return Response(State.of(request).metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def tokenizer_encode(request: Request) -> Response:
    """RTP-LLM's shape."""
    state = State.of(request)
    body = await json_object(request, state.body_limit)
    ids = await encode_text(state, _text(body.get("prompt")))
    return _json(
        {"token_ids": ids, "tokens": [state.runtime.token_bytes[token].decode(errors="replace") for token in ids], "error": ""}
    )


async def tokenize(request: Request) -> Response:
    """vLLM's shape: of a prompt, or of messages as the chat template renders them."""
    state = State.of(request)
    body = await json_object(request, state.body_limit)
    if isinstance(body.get("messages"), list):
        ids = await render_chat(state, body["messages"], add_generation_prompt=body.get("add_generation_prompt") is not False)
    else:
        ids = await encode_text(state, _text(body.get("prompt")), add_special_tokens=body.get("add_special_tokens") is not False)
    return _json({"count": len(ids), "max_model_len": state.runtime.description.context, "tokens": ids})


async def detokenize(request: Request) -> Response:
    state = State.of(request)
    tokens = (await json_object(request, state.body_limit)).get("tokens")
    vocab = state.runtime.tokenizer.vocab_size
    if not isinstance(tokens, list) or any(type(token) is not int or not 0 <= token < vocab for token in tokens):
        raise RequestError(Fault.parameter, f"tokens={quote(tokens)}: must be a list of token ids from 0 to {vocab - 1}", "tokens")
    return _json({"prompt": state.runtime.tokenizer.decode(tokens, skip_special_tokens=False)})


def _text(prompt: object) -> str:
    if prompt is None:
        raise RequestError(Fault.no_prompt, "prompt is missing", "prompt")
    if not isinstance(prompt, str):
        raise RequestError(Fault.body, f"prompt={quote(prompt)}: must be text", "prompt")
    return prompt
