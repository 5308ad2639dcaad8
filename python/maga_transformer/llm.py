"""The library: `LLM(path).generate(...)`, without a server and without asyncio."""

from __future__ import annotations

import os
import queue
import select
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from maga_transformer.config import Config
from maga_transformer.embedding import Input, Vector, unit
from maga_transformer.generate_config import GenerateConfig
from maga_transformer.models.task import EMBED, SCORE
from maga_transformer.output import SequenceText
from maga_transformer.request import Fault, Job, RequestError
from maga_transformer.startup import load_runtime

if TYPE_CHECKING:
    from maga_transformer._core import Event


# Fields of generate_config that shape an HTTP answer.
_ROUTE_ONLY = frozenset({"yield_generator", "return_incremental", "return_input_ids", "return_output_ids", "request_format"})


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class TokenLogprob:
    """`top` are the most likely tokens with their values, best first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Result:
    """One prompt's output. With num_return_sequences > 1, `others` holds the further ones."""

    text: str
    token_ids: list[int]
    finish_reason: str  # "stop" or "length"
    usage: Usage
    logprobs: list[TokenLogprob] | None = None
    others: list[Result] = field(default_factory=list)


class LLM:
    """A model in this process. `settings` are those of `maga config`, by name; the environment does not count.

    >>> with LLM("model.gguf", threads=2) as llm:
    ...     print(llm.generate("The capital of France is", max_new_tokens=8, temperature=0).text)

    Sampling keywords are the fields of RTP-LLM's generate_config, as on the raw route (max_new_tokens, temperature, top_k, top_p,
    min_p, random_seed, stop_words_str, ..., logprobs). Methods may be called from several threads at once."""

    def __init__(self, path: str | os.PathLike[str], **settings: object) -> None:
        self._runtime = load_runtime(Config.without_environment(checkpoint_path=os.fspath(path), **settings))
        self.tokenizer = self._runtime.tokenizer
        self._wake_read, self._wake_write = os.pipe()
        self._thread: threading.Thread | None = threading.Thread(target=self._dispatch, name="maga-events", daemon=True)
        self._thread.start()

    @overload
    def generate(self, prompts: str | list[int], **sampling: Any) -> Result: ...
    @overload
    def generate(self, prompts: list[str] | list[list[int]], **sampling: Any) -> list[Result]: ...
    def generate(self, prompts: str | list[int] | list[str] | list[list[int]], **sampling: Any) -> Result | list[Result]:
        """A Result for a single prompt (text or token ids), a list of Results for several. Raises RequestError."""
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (int, np.integer)))
        several: Sequence[Any] = [prompts] if single else prompts
        config = self._config(sampling)
        runs = [_Run(self, job) for job in [self._job(prompt, config) for prompt in several]]
        try:
            for run in runs:
                run.start()
            results = [run.result() for run in runs]
        finally:
            for run in runs:
                run.cancel()
        return results[0] if single else results

    def stream(self, prompt: str | Sequence[int], **sampling: Any) -> Iterator[str]:
        """The output's text as it comes. Leaving the loop early cancels the rest."""
        config = self._config(sampling)
        run = _Run(self, self._job(prompt, config))
        return run.stream()

    def chat(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> Result:
        """The answer to a conversation, through the model's own chat template."""
        text = self.tokenizer.apply_chat_template([dict(turn) for turn in messages], None, add_generation_prompt=True)
        return self.generate(self.tokenizer.encode(text, add_special_tokens=False), **sampling)

    def embed(self, texts: str | Sequence[str], *, dimensions: int | None = None) -> Vector:
        """(width) of one text, or (texts, width), by a model that embeds. Raises RequestError."""
        embedder = self._runtime.embedder
        embedder.require(EMBED)
        several = [texts] if isinstance(texts, str) else list(texts)
        rows = self._rows([embedder.encode(text) for text in several])
        vectors = np.stack([embedder.embedding(row, dimensions=dimensions) for row in rows])
        return vectors[0] if isinstance(texts, str) else vectors

    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        """How well each document answers the query: by a reranker from 0 to 1, by a model that embeds as a cosine."""
        embedder = self._runtime.embedder
        embedder.require(EMBED, SCORE)
        if embedder.task.kind == EMBED:
            vectors = [unit(vector) for vector in self.embed([query, *documents])]
            return [float(vectors[0] @ vector) for vector in vectors[1:]]
        return [embedder.relevance(row) for row in self._rows([embedder.encode(query, text, truncate=-1) for text in documents])]

    def _rows(self, inputs: Sequence[Input]) -> list[Vector]:
        runs = [_Run(self, self._runtime.prepare_input(item)) for item in inputs]
        try:
            for run in runs:
                run.start()
            return [run.row() for run in runs]
        finally:
            for run in runs:
                run.cancel()

    def close(self) -> None:
        """Cancels what runs. Further calls raise."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._runtime.draining = True
        self._runtime.cancel_all()
        self._runtime.engine.drain(10.0)
        os.write(self._wake_write, b"x")
        thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _config(self, sampling: Mapping[str, Any]) -> GenerateConfig:
        for name in _ROUTE_ONLY & sampling.keys():
            raise RequestError(Fault.unsupported, f"{name} belongs to the raw HTTP route; a Result has everything", name)
        return GenerateConfig.parse(sampling, self._runtime.description.sampling_defaults)

    def _job(self, prompt: str | Sequence[int], config: GenerateConfig) -> Job:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return self._runtime.prepare(
            Job(
                prompt=ids,
                sampling=config.sampling(),
                sequences=max(1, config.num_return_sequences),
                timeout_seconds=config.timeout_seconds,
                cache_salt=config.cache_salt,
            )
        )

    def _dispatch(self) -> None:
        events = self._runtime.engine.event_fd()
        while True:
            ready, _, _ = select.select([events, self._wake_read], [], [])
            if events in ready:
                self._runtime.dispatch()
            if self._wake_read in ready:
                return


class _Run:
    """One job on its way through the engine."""

    def __init__(self, llm: LLM, job: Job) -> None:
        self._runtime = llm._runtime
        self._job = job
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._request: int | None = None
        self._running = job.sequences

    def start(self) -> None:
        self._request = self._runtime.submit(self._job, self._events.put)

    def cancel(self) -> None:
        if self._request is not None and self._running:
            self._runtime.cancel(self._request)

    def _next(self) -> Event:
        event = self._events.get()
        if event.finish:
            self._running -= 1
            if event.finish not in ("stop", "length"):
                raise RequestError(
                    Fault.timeout
                    if event.finish == "timeout"
                    else Fault.cancelled
                    if event.finish == "cancelled"
                    else Fault.execution,
                    event.error or f"the request ended: {event.finish}",
                )
        return event

    def stream(self) -> Iterator[str]:
        text = SequenceText(self._runtime.tokenizer, self._job.sampling)
        self.start()
        try:
            while self._running:
                delta = text.push(self._next())
                if delta:
                    yield delta
        finally:
            self.cancel()

    def row(self) -> Vector:
        return self._next().embedding

    def result(self) -> Result:
        texts = [SequenceText(self._runtime.tokenizer, self._job.sampling) for _ in range(self._job.sequences)]
        scores: list[list[tuple[float, list[tuple[int, float]]]]] = [[] for _ in texts]
        last: dict[int, Event] = {}
        while self._running:
            event = self._next()
            texts[event.sequence].push(event)
            scores[event.sequence] += event.logprobs
            last[event.sequence] = event
        results = [self._one(text, score, last[index]) for index, (text, score) in enumerate(zip(texts, scores, strict=True))]
        return replace(results[0], others=results[1:])

    def _one(self, text: SequenceText, scores: list[tuple[float, list[tuple[int, float]]]], event: Event) -> Result:
        logprobs = (
            [TokenLogprob(token, value, top) for token, (value, top) in zip(text.tokens, scores, strict=True)] if scores else None
        )
        return Result(
            text.text, text.tokens, event.finish, Usage(event.prompt_tokens, event.cached_tokens, event.output_tokens), logprobs
        )
