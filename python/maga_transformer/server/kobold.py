"""KoboldAI's routes, as SillyTavern and Kobold Lite use them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from maga_transformer import __version__
from maga_transformer.generate_config import validate
from maga_transformer.request import Fault, Job, RequestError
from maga_transformer.server.body import json_object
from maga_transformer.server.errors import encode, kobold_error
from maga_transformer.server.generation import Generation
from maga_transformer.server.kobold_request import GenkeyRequest, KoboldRequest, TokenCountRequest, parse, present
from maga_transformer.server.prompts import compiled, encode_text
from maga_transformer.server.state import State
from maga_transformer.server.streaming import EventStream, named_event, unless_gone

API_VERSION = "1.2.5"  # of KoboldAI's own routes
LIKE_KOBOLDCPP = "1.63"  # whose further routes these are


def _json(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")


async def generate(request: Request) -> Response:
    """Continues a text."""
    state = State.of(request)
    asked, ignored = parse(await json_object(request, state.body_limit))
    generation = await _generation(state, asked)
    try:
        with generation:
            await unless_gone(request, _finish(state, generation))
    finally:
        state.kobold.pop(asked.genkey, None)
    results = []
    for event, text in zip(generation.last_events[0], generation.texts[0], strict=True):
        finish = event.finish if event is not None else ""
        results.append(
            {
                "text": text.text,
                "finish_reason": finish if finish in ("stop", "length") else "stop",
                "prompt_tokens": len(generation.jobs[0].prompt),
                "completion_tokens": len(text.tokens),
            }
        )
    return Response(encode({"results": results}), headers=_headers(ignored), media_type="application/json")


async def generate_stream(request: Request) -> Response:
    """The same as events."""
    state = State.of(request)
    asked, ignored = parse(await json_object(request, state.body_limit))
    generation = await _generation(state, asked)

    def close() -> None:
        generation.cancel()
        state.kobold.pop(asked.genkey, None)

    return EventStream(
        _events(state, generation),
        lambda error: named_event("error", kobold_error(error)),
        on_close=close,
        keep_alive=True,
        headers=_headers(ignored),
    )


async def _events(state: State, generation: Generation) -> AsyncIterator[bytes]:
    try:
        async for deltas in generation.deltas():
            for delta in deltas:
                finish = delta.event.finish or None
                if delta.event.sequence == 0 and (delta.text or finish):
                    yield named_event("message", {"token": delta.text, "finish_reason": finish})
    except RequestError as error:
        if not _aborted(state, error):
            raise


async def _finish(state: State, generation: Generation) -> None:
    try:
        await generation.finish()
    except RequestError as error:
        if not _aborted(state, error):
            raise


def _aborted(state: State, error: RequestError) -> bool:
    """By /api/extra/abort: what there is so far is the answer."""
    return error.fault is Fault.cancelled and not state.runtime.draining


async def _generation(state: State, asked: KoboldRequest) -> Generation:
    prompt = await encode_text(state, asked.memory + asked.prompt)
    room = min(asked.max_context_length or state.runtime.description.context, state.runtime.description.context)
    kept = prompt[-max(1, room - asked.max_length) :]  # as these servers do: the beginning goes first
    job = Job(
        prompt=kept,
        sampling=asked.sampling(state.runtime.tokenizer.eos_ids),
        sequences=asked.n,
        grammar=await compiled(state, asked.grammar_of()),
    )
    generation = Generation(state.runtime, [state.runtime.prepare(job)])
    if asked.genkey:
        state.kobold[asked.genkey] = generation
    return generation


def _headers(ignored: list[str]) -> dict[str, str]:
    return {"X-Maga-Ignored": ", ".join(ignored)} if ignored else {}


async def abort(request: Request) -> Response:
    """Ends a running request, which answers with what it has."""
    state = State.of(request)
    generation = state.kobold.get(await _genkey(request))
    if generation is not None:
        generation.cancel()
    return _json({"success": generation is not None, "done": generation is not None})


async def check(request: Request) -> Response:
    """The text so far of a running request."""
    state = State.of(request)
    generation = state.kobold.get(await _genkey(request))
    return _json({"results": [{"text": generation.texts[0][0].text if generation else ""}]})


async def _genkey(request: Request) -> str:
    state = State.of(request)
    if request.method == "GET" or request.headers.get("content-length", "0") == "0":
        return ""
    return validate(GenkeyRequest, present(await json_object(request, state.body_limit))).genkey


async def tokencount(request: Request) -> Response:
    """How many tokens a text has."""
    state = State.of(request)
    asked = validate(TokenCountRequest, present(await json_object(request, state.body_limit)))
    ids = await encode_text(state, asked.prompt)
    return _json({"value": len(ids), "ids": ids})


async def model(request: Request) -> Response:
    """The name that is served."""
    return _json({"result": f"maga/{State.of(request).names[0]}"})


async def version(request: Request) -> Response:
    """Of KoboldAI's routes."""
    return _json({"result": API_VERSION})


async def extra_version(request: Request) -> Response:
    """Of KoboldCpp's routes."""
    return _json({"result": "KoboldCpp", "version": LIKE_KOBOLDCPP, "server": f"maga_transformer {__version__}"})


async def context_length(request: Request) -> Response:
    """Tokens of prompt and answer together."""
    return _json({"value": State.of(request).runtime.description.context})


async def soft_prompts(request: Request) -> Response:
    """There are none."""
    return _json({"values": []})


async def soft_prompt(request: Request) -> Response:
    """There is none."""
    return _json({"value": ""} if request.method == "GET" else {})


async def preloaded_story(request: Request) -> Response:
    """There is none."""
    return _json({})


async def performance(request: Request) -> Response:
    """What the engine does now."""
    state = State.of(request)
    stats: Mapping[str, Any] = state.runtime.engine.stats()
    return _json({"queue": stats["waiting"], "idle": int(not stats["running"]), "total_gens": stats["finished"]})


ROUTES = (
    ("/api/v1/generate", generate, ["POST"]),
    ("/api/latest/generate", generate, ["POST"]),
    ("/api/extra/generate/stream", generate_stream, ["POST"]),
    ("/api/extra/generate/check", check, ["GET", "POST"]),
    ("/api/extra/abort", abort, ["POST"]),
    ("/api/extra/tokencount", tokencount, ["POST"]),
    *(
        (f"/api/{prefix}{path}", route, methods)
        for prefix in ("v1", "latest")
        for path, route, methods in (
            ("/model", model, ["GET"]),
            ("/info/version", version, ["GET"]),
            ("/config/max_context_length", context_length, ["GET"]),
            ("/config/max_length", context_length, ["GET"]),
            ("/config/soft_prompts_list", soft_prompts, ["GET"]),
            ("/config/soft_prompt", soft_prompt, ["GET", "PUT"]),
        )
    ),
    ("/api/extra/version", extra_version, ["GET"]),
    ("/api/extra/true_max_context_length", context_length, ["GET"]),
    ("/api/extra/preloadstory", preloaded_story, ["GET"]),
    ("/api/extra/perf", performance, ["GET"]),
)
