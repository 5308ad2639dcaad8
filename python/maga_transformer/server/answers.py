"""Jobs to an OpenAI answer: one JSON object, or a stream of chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from maga_transformer.output import Delta
from maga_transformer.request import Job
from maga_transformer.server.errors import encode, openai_error
from maga_transformer.server.generation import Generation
from maga_transformer.server.rtp_chat import aux_info
from maga_transformer.server.schemas import ChatRequest, OpenAIRequest
from maga_transformer.server.shapes import Shape
from maga_transformer.server.state import State
from maga_transformer.server.streaming import EventStream, openai_event, unless_gone

_DONE = b"data: [DONE]\n\n"
_TEXT = "\0text\0"  # stands for the text of an event


async def answer(
    request: Request, state: State, asked: OpenAIRequest, jobs: Sequence[Job], shape: Shape, headers: Mapping[str, str]
) -> Response:
    generation = Generation(state.runtime, jobs)
    told = _Answer(generation, asked, shape)
    if asked.stream:
        return EventStream(
            told.events(),
            lambda error: openai_event(openai_error(error)),
            on_close=generation.cancel,
            keep_alive=True,
            headers=headers,
        )
    with generation:
        whole = await unless_gone(request, told.whole())
    return Response(encode(whole), headers=dict(headers), media_type="application/json")


class _Answer:
    def __init__(self, generation: Generation, asked: OpenAIRequest, shape: Shape) -> None:
        self._generation = generation
        self._asked = asked
        self._shape = shape
        self._scored = asked.logprob_count() >= 0
        self._sequences = asked.sequences
        self._include_usage, self._continuous_usage = asked.include_usage, asked.continuous_usage

    async def whole(self) -> dict[str, Any]:
        shape, generation = self._shape, self._generation
        stops: dict[int, str | int | None] = {}
        async for deltas in generation.deltas():
            for delta in deltas:
                index = self._index(delta)
                shape.chunks(index, delta)
                stops[index] = delta.stop
        choices: list[dict[str, Any]] = []
        asked_of_prompt = self._asked.prompt_logprobs is not None
        for job, texts in enumerate(generation.texts):
            of_prompt: dict[str, Any] = {}
            if asked_of_prompt:
                told = shape.prompt_logprobs(generation.jobs[job].prompt, generation.prompt_logprobs[job])
                of_prompt = {"prompt_logprobs": told}
            for sequence in self._best(job):
                text = texts[sequence]
                index = job * self._asked.sequences + sequence
                scores = self._scores(job, index, text.tokens, generation.logprobs[job][sequence])
                choices.append(
                    {
                        **shape.choice(index, text.text),
                        "index": len(choices),
                        "logprobs": scores,
                        **({} if isinstance(self._asked, ChatRequest) else of_prompt),
                        "finish_reason": shape.finish(index, generation.event(job, sequence).finish),
                        "stop_reason": stops[index],
                        **(self._ids(job, text.tokens) if self._asked.return_token_ids else {}),
                    }
                )
        body = {**shape.envelope(shape.name, choices), "usage": self._usage()}
        if isinstance(self._asked, ChatRequest):
            body |= of_prompt | self._aux_info(0)
        return body | self._prompt_ids() if self._asked.return_token_ids else body

    async def events(self) -> AsyncIterator[bytes]:
        """One choice an event: some clients look at the first choice only."""
        shape, frames = self._shape, dict[int, tuple[bytes, bytes]]()
        text_only = not (self._scored or self._asked.return_token_ids or self._continuous_usage)
        async for deltas in self._generation.deltas():
            for delta in deltas:
                index, news = self._index(delta), delta.event
                tokens, finish = news.tokens, news.finish
                if not (tokens or finish):
                    continue  # it told of the prompt
                if index not in frames:
                    opening = shape.opening(index)
                    if opening:
                        echoed = self._scores(delta.job, index, [], []) if self._scored else None
                        yield self._event(index, opening, echoed, more=self._opening_ids(delta.job))
                    frames[index] = self._frame(index)  # not before the first event, which may tell more than the others
                scores = shape.logprobs(index, tokens, news.logprobs) if self._scored and tokens else None
                ids = {"token_ids": tokens} if self._asked.return_token_ids and tokens else {}
                chunks = shape.chunks(index, delta) or ([shape.empty()] if scores or ids else [])
                for at, chunk in enumerate(chunks):
                    if not isinstance(chunk, str):
                        told = chunk
                    elif text_only:
                        head, tail = frames[index]
                        yield head + encode(chunk) + tail
                        continue
                    else:
                        told = shape.text(chunk)
                    first = at == 0
                    yield self._event(index, told, scores if first else None, more=ids if first else {})
                if finish:
                    reason = shape.finish(index, finish)
                    yield self._event(index, shape.empty(), finish=reason, more={"stop_reason": delta.stop})
        if self._include_usage:
            yield openai_event({**shape.envelope(shape.chunk_name, []), "usage": self._usage()})
        yield _DONE

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and behind the text of an event: all that the events of a choice have in common, once as JSON."""
        head, tail = self._event(index, self._shape.text(_TEXT), more={}).split(encode(_TEXT))
        return head, tail

    def _event(
        self, index: int, chunk: Mapping[str, Any], scores: Any = None, *, finish: str | None = None, more: Mapping[str, Any]
    ) -> bytes:
        choice = {"index": index, **chunk, "logprobs": scores, "finish_reason": finish, **more}
        body = self._shape.envelope(self._shape.chunk_name, [choice])
        if self._include_usage or self._continuous_usage:
            body["usage"] = self._usage() if self._continuous_usage else None
        if finish:
            body |= self._aux_info(index)
        return openai_event(body)

    def _aux_info(self, index: int) -> dict[str, Any]:
        """RTP-LLM's facts about an output."""
        if not isinstance(self._asked, ChatRequest) or not self._asked.aux_info:
            return {}
        return {"aux_info": aux_info(self._generation.last_events[0][index], len(self._generation.jobs[0].prompt))}

    def _scores(self, job: int, index: int, tokens: Sequence[int], logprobs: Sequence[Any]) -> dict[str, Any] | None:
        """The lists of a choice, behind those of a prompt that it repeats."""
        if not self._scored:
            return None
        generation = self._generation
        prompt = generation.jobs[job].prompt
        echoed = self._shape.echoed_logprobs(index, prompt, generation.prompt_logprobs[job])
        own = self._shape.logprobs(index, tokens, logprobs) if tokens or not echoed else {name: [] for name in echoed}
        return {name: [*echoed[name], *own[name]] for name in echoed} if echoed else own

    def _best(self, job: int) -> Sequence[int]:
        """With best_of: the outputs whose tokens are likeliest on average, best first."""
        asked, events = self._asked, self._generation.last_events[job]
        if asked.sequences == asked.outputs:
            return range(asked.outputs)
        averages = [event.cumulative_logprob / max(1, event.output_tokens) if event else 0.0 for event in events]
        return sorted(range(len(events)), key=lambda at: -averages[at])[: asked.outputs]

    def _index(self, delta: Delta) -> int:
        return delta.job * self._sequences + delta.event.sequence

    def _ids(self, job: int, tokens: Sequence[int]) -> dict[str, Any]:
        """vLLM gives a completion its prompt's ids with each choice, a chat once."""
        ids: dict[str, Any] = {"token_ids": list(tokens)}
        return ids if isinstance(self._asked, ChatRequest) else {"prompt_token_ids": list(self._generation.jobs[job].prompt), **ids}

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self._generation.jobs[0].prompt)} if isinstance(self._asked, ChatRequest) else {}

    def _opening_ids(self, job: int) -> dict[str, Any]:
        return {"prompt_token_ids": list(self._generation.jobs[job].prompt)} if self._asked.return_token_ids else {}

    def _usage(self) -> dict[str, Any]:
        """A prompt counts once, however many outputs share it."""
        generation = self._generation
        prompt = sum(len(job.prompt) for job in generation.jobs)
        events = [[event for event in of_job if event is not None] for of_job in generation.last_events]
        output = sum(event.output_tokens for of_job in events for event in of_job)
        cached = sum(min(event.cached_tokens for event in of_job) for of_job in events if of_job)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": self._shape.reasoning_tokens},
        }
