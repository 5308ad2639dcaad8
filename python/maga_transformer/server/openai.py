"""OpenAI's routes: /v1/chat/completions, /v1/completions, /v1/models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from maga_transformer.output import Delta
from maga_transformer.request import Fault, Job, RequestError, quote
from maga_transformer.server.body import json_object
from maga_transformer.server.chat import render_chat
from maga_transformer.server.errors import encode, openai_error
from maga_transformer.server.generation import Generation
from maga_transformer.server.prompts import encode_text
from maga_transformer.server.schemas import ChatRequest, CompletionRequest, OpenAIRequest, parse
from maga_transformer.server.shapes import ChatShape, CompletionShape, Shape
from maga_transformer.server.state import State
from maga_transformer.server.streaming import EventStream, openai_event, unless_gone

_DONE = b"data: [DONE]\n\n"


async def models(request: Request) -> Response:
    state = State.of(request)
    cards = [
        {
            "id": name,
            "object": "model",
            "created": state.created,
            "owned_by": "maga_transformer",
            "root": state.names[0],
            "parent": None,
            "max_model_len": state.runtime.description.context,
        }
        for name in state.names
    ]
    return Response(encode({"object": "list", "data": cards}), media_type="application/json")


async def chat_completions(request: Request) -> Response:
    state = State.of(request)
    asked, ignored = parse(ChatRequest, await json_object(request, state.body_limit))
    model = _model(state, asked)
    if asked.messages is None:
        raise RequestError(Fault.no_prompt, "messages is missing", "messages")
    prompt = await render_chat(state, asked.messages, add_generation_prompt=asked.add_generation_prompt is not False)
    jobs = [await _job(state, asked, prompt)]
    return await _answer(request, state, asked, jobs, ChatShape(state, model), ignored)


async def completions(request: Request) -> Response:
    state = State.of(request)
    asked, ignored = parse(CompletionRequest, await json_object(request, state.body_limit))
    model = _model(state, asked)
    prompts = await _prompts(state, asked)
    jobs = [await _job(state, asked, prompt) for prompt in prompts]
    echo = [state.runtime.tokenizer.decode(prompt) for prompt in prompts] if asked.echo else []
    return await _answer(request, state, asked, jobs, CompletionShape(state, model, asked.sequences, echo), ignored)


def _model(state: State, asked: OpenAIRequest) -> str:
    if asked.model and asked.model not in state.names:
        raise RequestError(
            Fault.unknown_model, f"The model `{asked.model[:128]}` does not exist. Served here: {', '.join(state.names)}", "model"
        )
    return asked.model or state.names[0]


async def _job(state: State, asked: OpenAIRequest, prompt: Sequence[int]) -> Job:
    # A word is banned at the beginning of the text and after a blank, which most vocabularies spell differently.
    spellings = [spelling for word in asked.bad_words or [] for spelling in (word, " " + word.lstrip(" "))]
    bad_words = [await encode_text(state, text, add_special_tokens=False, field="bad_words") for text in dict.fromkeys(spellings)]
    sampling = asked.sampling(state.runtime.description.sampling_defaults, bad_words)
    return state.runtime.prepare(
        Job(
            prompt=prompt,
            sampling=sampling,
            sequences=asked.sequences,
            priority=asked.priority or 0,
            cache_salt=asked.cache_salt or "",
        )
    )


async def _prompts(state: State, asked: CompletionRequest) -> list[Sequence[int]]:
    """A text, a list of texts, a list of ids, or a list of lists of ids. Ids are taken as they are."""
    prompt, limit = asked.prompt, state.runtime.config.max_queue
    if prompt is None:
        raise RequestError(Fault.no_prompt, "prompt is missing", "prompt")
    entries = prompt if isinstance(prompt, list) and any(isinstance(part, (str, list)) for part in prompt) else [prompt]
    if len(entries) > limit:
        raise RequestError(Fault.parameter, f"prompt has {len(entries)} entries; at most {limit} (MAX_QUEUE)", "prompt")
    prompts: list[Sequence[int]] = []
    for index, entry in enumerate(entries):
        place = "prompt" if entry is prompt else f"prompt[{index}]"
        if isinstance(entry, str):
            if not entry:
                raise RequestError(Fault.empty_prompt, f"{place} is empty", "prompt")
            prompts.append(await encode_text(state, entry, add_special_tokens=asked.add_special_tokens is not False))
        elif isinstance(entry, list):
            bad = next(((at, part) for at, part in enumerate(entry) if type(part) is not int or abs(part) >> 62), None)
            if bad is not None:
                raise RequestError(Fault.parameter, f"{place}[{bad[0]}]={quote(bad[1])}: must be a token id", "prompt")
            prompts.append(entry)
        else:
            raise RequestError(Fault.parameter, f"{place}={quote(entry)}: must be text or a list of token ids", "prompt")
    return prompts


async def _answer(
    request: Request, state: State, asked: OpenAIRequest, jobs: Sequence[Job], shape: Shape, ignored: Sequence[str]
) -> Response:
    headers = {"X-Maga-Ignored": ", ".join(ignored)} if ignored else {}
    generation = Generation(state.runtime, jobs)
    if asked.stream:
        return EventStream(
            _events(generation, asked, shape),
            lambda error: openai_event(openai_error(error)),
            on_close=generation.cancel,
            keep_alive=True,
            headers=headers,
        )
    with generation:
        return Response(
            encode(await unless_gone(request, _whole(generation, asked, shape))), headers=headers, media_type="application/json"
        )


async def _whole(generation: Generation, asked: OpenAIRequest, shape: Shape) -> dict[str, Any]:
    logprobs: dict[int, list[Any]] = {}
    stops: dict[int, str | int | None] = {}
    async for deltas in generation.deltas():
        for delta in deltas:
            index = _index(delta, asked)
            stops[index] = delta.stop
            if asked.logprob_count() >= 0:
                logprobs.setdefault(index, []).extend(delta.event.logprobs)
    choices = []
    for job, texts in enumerate(generation.texts):
        for sequence, text in enumerate(texts):
            index = job * asked.sequences + sequence
            scores = shape.logprobs(index, text.tokens, logprobs[index]) if index in logprobs else None
            choices.append(
                {
                    **shape.choice(index, text.text, scores),
                    "finish_reason": generation.event(job, sequence).finish,
                    "stop_reason": stops[index],
                }
            )
    return {**shape.envelope(shape.name, choices), "usage": _usage(generation)}


async def _events(generation: Generation, asked: OpenAIRequest, shape: Shape) -> AsyncIterator[bytes]:
    """One choice an event: some clients look at the first choice only."""
    opened: set[int] = set()

    def event(index: int, chunk: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
        body = shape.envelope(shape.chunk_name, [{"index": index, **chunk, "finish_reason": finish, **more}])
        if asked.include_usage or asked.continuous_usage:
            body["usage"] = _usage(generation) if asked.continuous_usage else None
        return openai_event(body)

    async for deltas in generation.deltas():
        for delta in deltas:
            index = _index(delta, asked)
            if index not in opened:
                opened.add(index)
                opening = shape.opening(index)
                if opening:
                    yield event(index, opening)
            news, finish = delta.event, delta.event.finish or None
            scores = shape.logprobs(index, news.tokens, news.logprobs) if asked.logprob_count() >= 0 and news.tokens else None
            if delta.text or scores:
                yield event(index, shape.chunk(delta.text, scores))
            if finish:
                yield event(index, shape.chunk("", None), finish, stop_reason=delta.stop)
    if asked.include_usage:
        yield openai_event({**shape.envelope(shape.chunk_name, []), "usage": _usage(generation)})
    yield _DONE


def _index(delta: Delta, asked: OpenAIRequest) -> int:
    return delta.job * asked.sequences + delta.event.sequence


def _usage(generation: Generation) -> dict[str, Any]:
    """A prompt counts once, however many outputs share it."""
    prompt = sum(len(job.prompt) for job in generation.jobs)
    events = [[event for event in of_job if event is not None] for of_job in generation.last_events]
    output = sum(event.output_tokens for of_job in events for event in of_job)
    cached = sum(min(event.cached_tokens for event in of_job) for of_job in events if of_job)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
