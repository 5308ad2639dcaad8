"""RTP-LLM's raw route: POST /. Shapes, names and numbers are RTP-LLM's; statuses are real HTTP statuses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from maga_transformer.generate_config import ALIASES, GenerateConfig, refuse_unless_neutral
from maga_transformer.output import Delta
from maga_transformer.request import Fault, Job, RequestError, quote
from maga_transformer.server.body import json_object
from maga_transformer.server.chat import Conversation, render_chat
from maga_transformer.server.errors import encode, raw_error
from maga_transformer.server.generation import Generation
from maga_transformer.server.logprobs import prompt_logprobs
from maga_transformer.server.prompts import compiled, encode_text
from maga_transformer.server.rtp_chat import aux_info
from maga_transformer.server.state import State
from maga_transformer.server.streaming import EventStream, raw_event, unless_gone

ENVELOPE = frozenset(
    {
        "prompt",
        "text",
        "prompt_batch",
        "messages",
        "functions",
        "images",
        "urls",
        "generate_config",
        "generation_config",
        "private_request",
        "master_info",
    }
)
_DONE = b"data:[done]\r\n\r\n"


@dataclass(frozen=True)
class RawRequest:
    prompts: Sequence[str] | None  # one or several texts, or
    chat: Sequence[Mapping[str, Any]] | None  # one conversation
    batch: bool  # answer in the batch shape
    config: GenerateConfig
    private: bool


async def raw(request: Request) -> Response:
    """RTP-LLM's generation: one prompt or several, whole or streamed."""
    state = State.of(request)
    body = await json_object(request, state.body_limit)
    asked = parse(body, state.runtime.description.sampling_defaults)
    request.state.private = asked.private
    generation = Generation(state.runtime, await _jobs(state, asked))
    answer = _Answer(generation, asked, state.runtime.token_bytes)
    if asked.config.yield_generator:
        return EventStream(answer.events(), lambda error: raw_event(raw_error(error)), on_close=generation.cancel, keep_alive=False)
    with generation:
        await unless_gone(request, generation.finish())
    return Response(encode(answer.whole()), media_type="application/json")


def parse(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> RawRequest:
    nested = _either(body, "generate_config", "generation_config")
    if nested is not None and not isinstance(nested, dict):
        raise RequestError(Fault.parameter, f"generate_config={quote(nested)}: must be an object", "generate_config")
    top = {key: value for key, value in body.items() if key not in ENVELOPE and value is not None}
    taken = {ALIASES.get(key, key) for key in top}  # the top level wins
    fields = {**{key: value for key, value in (nested or {}).items() if ALIASES.get(key, key) not in taken}, **top}
    config = GenerateConfig.parse(fields, defaults)
    if config.return_incremental and not config.yield_generator:
        raise RequestError(
            Fault.body, "return_incremental needs yield_generator: only a stream has increments", "return_incremental"
        )
    for name in ("images", "urls", "functions"):
        if body.get(name) is not None:
            refuse_unless_neutral(name, body[name], ([],))
    private = body.get("private_request") or False
    if not isinstance(private, bool):
        raise RequestError(Fault.body, f"private_request={quote(private)}: must be true or false", "private_request")
    prompts, chat, batch = _prompts(body, config)
    return RawRequest(prompts, chat, batch, config, private)


def _prompts(body: Mapping[str, Any], config: GenerateConfig) -> tuple[list[str] | None, list[Any] | None, bool]:
    batch, messages = body.get("prompt_batch"), body.get("messages")
    prompt = _either(body, "prompt", "text")
    given = [name for name, value in (("prompt_batch", batch), ("messages", messages), ("prompt", prompt)) if value is not None]
    if not given:
        raise RequestError(Fault.no_prompt, "no prompt: give prompt, prompt_batch or messages", "prompt")
    if len(given) > 1:
        raise RequestError(Fault.body, f"{' and '.join(given)} exclude each other", given[0])
    name, value = given[0], batch if batch is not None else messages if messages is not None else prompt
    if name == "messages" or (isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value)):
        if not isinstance(value, list):
            raise RequestError(Fault.body, f"{name}={quote(value)}: must be a list of messages", name)
        return None, value, False
    if config.request_format == "chatapi":
        raise RequestError(Fault.body, "request_format=chatapi needs messages", "request_format")
    texts = [value] if name == "prompt" and isinstance(value, str) else value
    if not isinstance(texts, list):
        raise RequestError(
            Fault.body, f"{name}={quote(value)}: must be {'text or ' if name == 'prompt' else ''}a list of texts", name
        )
    if not texts:
        raise RequestError(Fault.no_prompt, f"{name} is an empty list", name)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise RequestError(Fault.body, f"{name}[{index}]={quote(text)}: must be text", name)
        if not text:
            raise RequestError(
                Fault.empty_prompt, f"{name}[{index}] is empty" if isinstance(value, list) else f"{name} is empty", name
            )
    return texts, None, name == "prompt_batch" or len(texts) > 1


def _either(body: Mapping[str, Any], name: str, alias: str) -> Any:
    value, other = body.get(name), body.get(alias)
    if value is not None and other is not None and value != other:
        raise RequestError(Fault.body, f"{name} and {alias} are the same field with two values; keep one", name)
    return other if value is None else value


async def _jobs(state: State, asked: RawRequest) -> list[Job]:
    config, runtime = asked.config, state.runtime
    if asked.prompts is not None and len(asked.prompts) > runtime.config.max_queue:
        raise RequestError(
            Fault.body,
            f"prompt_batch has {len(asked.prompts)} prompts; at most {runtime.config.max_queue} (MAX_QUEUE)",
            "prompt_batch",
        )
    if asked.chat is not None:
        prompts = [(await render_chat(state, Conversation(messages=asked.chat))).ids]
    else:
        prompts = [await encode_text(state, text, whole=True) for text in asked.prompts or ()]
    grammar = await compiled(state, config.grammar())
    select = [
        await encode_text(state, text, add_special_tokens=False, field="select_tokens_str") for text in config.select_tokens_str
    ]
    sampling = config.sampling([token for ids in select for token in ids])
    if sampling.beams is None:
        sampling = dataclasses.replace(sampling, logprobs=max(0, sampling.logprobs))  # for aux_info's cum_log_probs
    return [
        runtime.prepare(
            Job(
                prompt=prompt,
                sampling=sampling,
                sequences=config.sequences,
                timeout_seconds=config.timeout_seconds,
                cache_salt=config.cache_salt,
                grammar=grammar,
            )
        )
        for prompt in prompts
    ]


class _Answer:
    """The four shapes: single or batch, of one output or of num_return_sequences."""

    def __init__(self, generation: Generation, asked: RawRequest, token_bytes: Sequence[bytes]) -> None:
        self._generation = generation
        self._config = asked.config
        self._batch = asked.batch
        self._token_bytes = token_bytes

    def whole(self) -> dict[str, Any]:
        return self._shape(None)

    async def events(self) -> AsyncIterator[bytes]:
        async for deltas in self._generation.deltas():
            if any(delta.text or delta.event.finish for delta in deltas):
                yield raw_event(self._shape(deltas if self._config.return_incremental else None))
        yield _DONE

    def _shape(self, deltas: Sequence[Delta] | None) -> dict[str, Any]:
        """`deltas`: only this news; None: everything so far."""
        entries = [self._entry(job, deltas) for job in range(len(self._generation.jobs))]
        return {"response_batch": entries} if self._batch else entries[0]

    def _entry(self, job: int, deltas: Sequence[Delta] | None) -> dict[str, Any]:
        generation, config = self._generation, self._config
        events, texts = generation.last_events[job], generation.texts[job]
        if deltas is None:
            shown = [text.text for text in texts]
            ids = [list(text.tokens) for text in texts]
        else:
            own = [
                [delta for delta in deltas if delta.job == job and delta.event.sequence == sequence]
                for sequence in range(len(texts))
            ]
            shown = ["".join(delta.text for delta in news) for news in own]
            ids = [[token for delta in news for token in delta.event.tokens] for news in own]
        many = config.num_return_sequences >= 1
        aux = [aux_info(event, len(generation.jobs[job].prompt)) for event in events]
        if config.num_beams > 1:
            aux[0]["beam_responses"] = shown
            aux[0]["cum_log_probs"] = [event.cumulative_logprob if event else 0.0 for event in events]
        if config.return_softmax_probs:
            for info, scores in zip(aux, generation.logprobs[job], strict=True):
                info["softmax_probs"] = [math.exp(value) for value, _ in scores]
        entry: dict[str, Any] = {
            "response": shown if many else shown[0],
            "finished": all(event is not None and bool(event.finish) for event in events),
            "aux_info": aux if many else aux[0],
        }
        if config.calculate_loss:
            losses = [-value for value, _, _ in generation.prompt_logprobs[job]]
            entry["loss"] = losses if config.calculate_loss == 2 else math.exp(sum(losses) / max(1, len(losses)))
        if config.prompt_logprobs >= 0:
            prompt = generation.jobs[job].prompt
            entry["prompt_logprobs"] = prompt_logprobs(self._token_bytes, prompt, generation.prompt_logprobs[job])
        if config.logprobs >= 0:
            entry["logprobs"] = [
                [
                    {"token_id": token, "logprob": value, "top_logprobs": [{"token_id": i, "logprob": x} for i, x in top]}
                    for token, (value, top) in zip(text.tokens, scores, strict=True)
                ]
                for text, scores in zip(texts, generation.logprobs[job], strict=True)
            ]
        for name in ("logits", "hidden_states"):
            if getattr(config, f"return_{name}"):
                entry[name] = [getattr(event, name).tolist() if event else [] for event in events]
        if config.return_output_ids:
            entry["output_ids"] = ids
        if config.return_input_ids:
            entry["input_ids"] = [generation.jobs[job].prompt] * len(texts)
        return entry
