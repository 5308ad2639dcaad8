"""The library: `LLM(path).generate(...)`, without a server and without asyncio."""

from __future__ import annotations

import os
import queue
import select
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from maga_transformer.config import Config
from maga_transformer.embedding import Input, Vector, unit
from maga_transformer.generate_config import GenerateConfig
from maga_transformer.models.task import EMBED, SCORE
from maga_transformer.output import SequenceText
from maga_transformer.request import Fault, Job, RequestError, Sampling
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
    """One prompt's output. With num_return_sequences or num_beams > 1, `others` holds the further ones, of beams the best first."""

    text: str
    token_ids: list[int]
    finish_reason: str  # "stop" or "length"
    usage: Usage
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None  # of every token of the prompt but the first
    # calculate_loss: 1: the prompt's perplexity, 2: -ln p of each of its tokens but the first
    loss: float | list[float] | None = None
    logits: Vector | None = None  # (tokens, vocab or select_tokens_id)
    hidden_states: Vector | None = None  # (tokens, hidden)
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
        self.name = self._runtime.description.names[0]
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
        jobs = [self._job(prompt, config) for prompt in several]
        runs = [_Run(self, job, config.calculate_loss) for job in jobs]
        try:
            for run in runs:
                run.start()
            results = [run.result() for run in runs]
        finally:
            for run in runs:
                run.cancel()
        return results[0] if single else results

    def stream(self, prompt: str | Sequence[int], **sampling: Any) -> TextStream:
        """The output's text as it comes. Leaving the loop early cancels the rest."""
        config = self._config(sampling)
        if config.sequences > 1:
            raise RequestError(Fault.unsupported, "a stream is of one output; leave num_return_sequences and num_beams out")
        return TextStream(_Run(self, self._job(prompt, config)))

    def chat(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> Result:
        """The answer to a conversation, through the model's own chat template."""
        return self.generate(self._chat_prompt(messages), **sampling)

    def stream_chat(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> TextStream:
        """As `chat`, but the text as it comes."""
        return self.stream(self._chat_prompt(messages), **sampling)

    def _chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        text = self.tokenizer.apply_chat_template([dict(turn) for turn in messages], None, add_generation_prompt=True)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def prompt_logprobs(self, prompts: Sequence[str | Sequence[int]]) -> list[Vector]:
        """Of each prompt (text or token ids) the log-probability of every token but the first, given those before it:
        (tokens - 1) in fp32. Raises RequestError."""
        sampling = Sampling(max_new_tokens=0, prompt_logprobs=0)
        jobs = [self._runtime.prepare(Job(prompt=self._ids(prompt), sampling=sampling)) for prompt in prompts]
        scores = [[value for event in events for value, _, _ in event.prompt_logprobs] for events in self._events(jobs)]
        return [np.array(values, np.float32) for values in scores]

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
        return [events[-1].embedding for events in self._events([self._runtime.prepare_input(item) for item in inputs])]

    def _events(self, jobs: Sequence[Job]) -> list[list[Event]]:
        """All that each job tells."""
        runs = [_Run(self, job) for job in jobs]
        try:
            for run in runs:
                run.start()
            return [run.events() for run in runs]
        finally:
            for run in runs:
                run.cancel()

    @property
    def context(self) -> int:
        """Tokens of prompt and output together."""
        return self._runtime.description.context

    def stats(self) -> dict[str, Any]:
        """The engine's gauges and counters: EngineStats of cpp/engine/engine.h, field by field."""
        return self._runtime.engine.stats()

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
        self._runtime.close()
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
        select = [self.tokenizer.encode(text, add_special_tokens=False) for text in config.select_tokens_str]
        return self._runtime.prepare(
            Job(
                prompt=self._ids(prompt),
                sampling=config.sampling([token for ids in select for token in ids]),
                sequences=config.sequences,
                timeout_seconds=config.timeout_seconds,
                cache_salt=config.cache_salt,
                grammar=self._runtime.grammars.compile(grammar) if (grammar := config.grammar()) else None,
            )
        )

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _dispatch(self) -> None:
        events = self._runtime.engine.event_fd()
        while True:
            ready, _, _ = select.select([events, self._wake_read], [], [])
            if events in ready:
                self._runtime.dispatch()
            if self._wake_read in ready:
                return


class TextStream(Iterator[str]):
    """The pieces of an output's text."""

    def __init__(self, run: _Run) -> None:
        self._last: list[Event] = []
        self._pieces = run.stream(self._last.append)  # no cycle through self: whoever drops it cancels the rest at once

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Cancels the rest."""
        self._pieces.close()

    @property
    def usage(self) -> Usage | None:
        """None until the output has ended."""
        return _usage(self._last[0]) if self._last else None


def _usage(event: Event) -> Usage:
    return Usage(event.prompt_tokens, event.cached_tokens, event.output_tokens)


class _Run:
    """One job on its way through the engine."""

    def __init__(self, llm: LLM, job: Job, calculate_loss: int = 0) -> None:
        self._calculate_loss = calculate_loss
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
                fault = {"timeout": Fault.timeout, "cancelled": Fault.cancelled}.get(event.finish, Fault.execution)
                raise RequestError(fault, event.error or f"the request ended: {event.finish}")
        return event

    def stream(self, ended: Callable[[Event], None]) -> Generator[str, None, None]:
        """`ended` gets the last event."""
        text = SequenceText(self._runtime.tokenizer, self._job.sampling)
        self.start()
        try:
            while self._running:
                event = self._next()
                delta = text.push(event)
                if event.finish:
                    ended(event)
                if delta:
                    yield delta
        finally:
            self.cancel()

    def events(self) -> list[Event]:
        events = []
        while self._running:
            events.append(self._next())
        return events

    def result(self) -> Result:
        texts = [SequenceText(self._runtime.tokenizer, self._job.sampling) for _ in range(self._job.sequences)]
        told: list[list[Event]] = [[] for _ in texts]
        while self._running:
            event = self._next()
            texts[event.sequence].push(event)
            told[event.sequence].append(event)
        results = [self._one(text, events) for text, events in zip(texts, told, strict=True)]
        return replace(results[0], others=results[1:], **self._of_prompt(told[0]))

    def _one(self, text: SequenceText, events: Sequence[Event]) -> Result:
        sampling, last = self._job.sampling, events[-1]
        scores = [score for event in events for score in event.logprobs]
        chosen = [event for event in events if event.tokens]
        return Result(
            text=text.text,
            token_ids=text.tokens,
            finish_reason=last.finish,
            usage=_usage(last),
            logprobs=[TokenLogprob(token, value, top) for token, (value, top) in zip(text.tokens, scores, strict=True)]
            if sampling.logprobs >= 0
            else None,
            logits=np.stack([event.logits for event in chosen]) if sampling.return_logits else None,
            hidden_states=np.stack([event.hidden_states for event in chosen]) if sampling.return_hidden_states else None,
        )

    def _of_prompt(self, events: Sequence[Event]) -> dict[str, Any]:
        if self._job.sampling.prompt_logprobs < 0:
            return {}
        scores = [score for event in events for score in event.prompt_logprobs]
        pairs = zip(self._job.prompt[1:], scores, strict=True)
        losses = [-value for value, _, _ in scores]
        loss = {0: None, 1: float(np.exp(np.mean(losses))) if losses else 1.0, 2: losses}[self._calculate_loss]
        return {"prompt_logprobs": [TokenLogprob(token, value, top) for token, (value, _, top) in pairs], "loss": loss}
