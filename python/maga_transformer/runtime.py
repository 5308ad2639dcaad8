"""A loaded model, ready to answer: it checks jobs, submits them to the engine and hands each its events."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from maga_transformer import _core
from maga_transformer.config import Config
from maga_transformer.embedding import Embedder, Input
from maga_transformer.models.task import GENERATE, Task
from maga_transformer.request import Fault, Job, RequestError, Sampling, long_prompt, quote
from maga_transformer.structured import Compiler, MaskWorker

if TYPE_CHECKING:
    from maga_transformer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_T = TypeVar("_T")

Sink = Callable[["_core.Event"], None]
_MOST_BREAKERS = 1024  # texts whose tokens are remembered


@dataclass(frozen=True, kw_only=True)
class Description:
    """What the start message, /v1/models and the metrics say about the model."""

    names: list[str]
    family: str
    stored: str  # the types of its weights as they are stored, with their shares
    device: str
    context: int  # tokens of prompt and output together
    kv_dtype: str
    kv_bytes: int
    kv_tokens: int  # tokens that the pages hold
    kv_measured: str  # how the size was found
    weight_bytes: int
    buffer_bytes: int
    bytes_per_second: float  # of the device's memory: of a GPU as specified, of a CPU as measured at the start
    card_bytes: int  # memory of the GPU; 0 on a CPU
    load_seconds: float
    sampling_defaults: Mapping[str, Any]
    task: Task
    segment_shift: int  # of the positions of a second text
    embedding_width: int  # 0: the model generates
    whole_prompts: bool  # a step must bring all of an input
    prefix: str  # "8 virtual tokens from /path" before every prompt; "": none


@dataclass
class _Running:
    sink: Sink
    sequences: int  # that have not ended
    grammar: int  # of the masks; 0: none


class Runtime:
    """Submits jobs and hands every event to its job's sink. `dispatch` must be called whenever `event_fd` is readable: by the
    server's event loop, or by the library's own thread."""

    def __init__(
        self, config: Config, engine: _core.Engine, tokenizer: Tokenizer, token_bytes: Sequence[bytes], description: Description
    ) -> None:
        self.config = config
        self.engine = engine
        self.tokenizer = tokenizer
        self.token_bytes = token_bytes
        self.description = description
        step = config.max_num_batched_tokens if description.whole_prompts else 0
        limits = (description.context, step, description.task.max_tokens)
        longest = min(limit for limit in limits if limit)
        why = " (MAX_NUM_BATCHED_TOKENS, as it reads an input in one step)" if longest == step < description.context else ""
        self.embedder = Embedder(tokenizer, description.task, longest, description.embedding_width, why)
        self.draining = False
        self._breakers: dict[str, int] = {}
        self.on_events: Callable[[Sequence[_core.Event]], None] = lambda events: None
        self.grammars = Compiler(tokenizer, token_bytes)
        self._masks = MaskWorker(engine.masks(), token_bytes)
        self._jobs: dict[int, _Running] = {}  # by request
        self._lock = threading.Lock()  # an event must not be dispatched before submit has noted its sink

    @property
    def in_flight(self) -> int:
        return len(self._jobs)

    def prepare(self, job: Job) -> Job:
        """Checks the prompt, and completes the sampling: limits that fit, end-of-text tokens, the operator's stop words."""
        vocab, context = self.tokenizer.vocab_size, self.description.context
        self.embedder.require(GENERATE)
        if not job.prompt:
            raise RequestError(Fault.empty_prompt, "the prompt is empty: it has no token")
        ids = np.asarray(job.prompt)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise RequestError(Fault.parameter, "prompt: token ids are integers", "prompt")
        if ids.min() < 0 or ids.max() >= vocab:
            at = int(np.flatnonzero((ids < 0) | (ids >= vocab))[0])
            raise RequestError(
                Fault.parameter, f"prompt[{at}]={ids[at]}: outside the vocabulary, valid: 0 to {vocab - 1}", "prompt"
            )
        room = context - len(ids)
        if room < 1:
            raise long_prompt(context, len(ids))
        given, config = job.sampling, self.config
        if job.grammar is not None and given.beams is not None:
            raise RequestError(Fault.unsupported, "a beam search cannot follow a grammar: leave one of them out")
        beams = given.beams
        if beams is not None and beams.width > config.max_num_seqs:
            raise RequestError(
                Fault.parameter,
                f"{beams.width} beams were asked for (num_beams, or best_of and n); at most {config.max_num_seqs} run at once "
                "(MAX_NUM_SEQS)",
                "num_beams",
            )
        if job.sequences > config.max_num_seqs:
            raise RequestError(
                Fault.parameter,
                f"{job.sequences} outputs of one prompt were asked for; at most {config.max_num_seqs} run at once (MAX_NUM_SEQS)",
                "n",
            )
        if given.max_new_tokens is not None and given.min_new_tokens > given.max_new_tokens:
            raise RequestError(
                Fault.parameter,
                f"at least {given.min_new_tokens} new tokens were asked for (min_new_tokens, min_tokens), but at most "
                f"{given.max_new_tokens} (max_new_tokens, max_tokens)",
                "min_new_tokens",
            )
        stop_strings = [*given.stop_strings, *config.stop_words_str, *config.force_stop_words_str]
        stop_words = [*given.stop_words, *config.stop_words_list, *config.force_stop_words_list]
        wanted = room if given.max_new_tokens is None else min(given.max_new_tokens, room)
        sampling = dataclasses.replace(
            given,
            max_new_tokens=wanted,
            min_new_tokens=min(given.min_new_tokens, wanted),
            top_k=min(given.top_k, vocab),
            stop_strings=stop_strings,
            stop_words=stop_words,
            rare=self._named_breakers(given.rare),
        )
        self._check_ids(sampling)
        return dataclasses.replace(job, sampling=sampling)

    def check_stop_words(self) -> None:
        """Raises what every request would, should the configured stop words be wrong."""
        if self.description.task.kind != GENERATE:
            return
        job = self.prepare(Job(prompt=[0], sampling=Sampling(max_new_tokens=1)))
        self._params(job.sampling).validate(self.tokenizer.vocab_size)

    def _check_ids(self, sampling: Sampling) -> None:
        vocab = self.tokenizer.vocab_size
        lists: list[tuple[str, Sequence[int]]] = [
            ("logit_bias", list(sampling.logit_bias)),
            ("stop_token_ids", sampling.stop_token_ids),
            ("select_tokens_id", sampling.select_tokens),
            ("top_p_reset_ids", sampling.top_p_reset_ids),
            ("eos_token_id", sampling.eos_ids or ()),
            ("custom_token_bans", sampling.rare.get("token_bans", ())),
            ("allowed_token_ids", sampling.rare.get("allowed_tokens", ())),
            *(("token_ban_ranges", ids) for ids, _, _ in sampling.rare.get("token_ban_ranges", ())),
        ]
        lists += [("bad_words_list", ids) for ids in sampling.bad_words] + [("stop_words_list", ids) for ids in sampling.stop_words]
        for name, ids in lists:
            for token in ids:
                if not 0 <= token < vocab:
                    raise RequestError(
                        Fault.parameter, f"{name}: token id {quote(token)} is outside the vocabulary, valid: 0 to {vocab - 1}", name
                    )

    def _named_breakers(self, rare: Mapping[str, Any]) -> dict[str, Any]:
        """DRY's breakers as tokens: the last one of each text behind a letter, as Aphrodite takes it."""
        given = dict(rare)
        texts = given.pop("dry_sequence_breakers", None)
        if texts is None:
            return given
        for text in texts:
            if text not in self._breakers:
                ids = self.tokenizer.encode("a" + text, add_special_tokens=False)
                if len(self._breakers) >= _MOST_BREAKERS:
                    self._breakers.clear()
                self._breakers[text] = ids[-1]
        return {**given, "dry_breakers": [self._breakers[text] for text in texts]}

    def prepare_input(self, item: Input) -> Job:
        """Of something to embed or to score; its one event has the result."""
        return Job(prompt=item.ids, sampling=Sampling(max_new_tokens=1), segment_start=item.segment_start)

    def submit(self, job: Job, sink: Sink) -> int:
        """Takes a job that `prepare` or `prepare_input` returned. Never waits. Returns the request's number, for `cancel`."""
        if self.draining:
            raise RequestError(Fault.draining, "shutting down: no new requests are taken")
        limit = self.config.concurrency_limit
        if limit and len(self._jobs) >= limit:
            raise RequestError(Fault.busy, f"{limit} requests are running or waiting already, as many as CONCURRENCY_LIMIT allows")
        params = self._params(job.sampling)
        segment = (
            {}
            if job.segment_start is None
            else {"segment_start": job.segment_start, "segment_shift": self.description.segment_shift}
        )
        grammar = self._masks.register(job.grammar) if job.grammar else 0
        with self._lock:
            try:
                request = self.engine.submit(
                    np.asarray(job.prompt, dtype=np.int32),
                    params,
                    sequences=job.sequences,
                    priority=job.priority,
                    timeout_seconds=job.timeout_seconds,
                    cache_salt=job.cache_salt,
                    grammar=grammar,
                    **segment,
                )
            except _core.BusyError as error:
                self._masks.forget(grammar)
                raise RequestError(Fault.busy, str(error)) from None
            except ValueError as error:
                self._masks.forget(grammar)
                raise RequestError(Fault.parameter, str(error)) from None
            except _core.MagaError as error:  # the loop has ended
                self._masks.forget(grammar)
                raise RequestError(Fault.execution, str(error)) from None
            self._jobs[request] = _Running(sink, job.sequences, grammar)
        return request

    def _params(self, sampling: Sampling) -> _core.SamplingParams:
        config = self.config
        own_stops = config.force_stop_words or config.force_stop_words_str or config.force_stop_words_list
        eos = [] if sampling.ignore_eos or own_stops else self.tokenizer.eos_ids if sampling.eos_ids is None else sampling.eos_ids
        rare = dict(sampling.rare)
        if sampling.beams:
            beams = sampling.beams
            rare |= {"beam_width": beams.width, "length_penalty": beams.length_penalty, "beam_stop": beams.stop}
        return _core.SamplingParams(
            **rare,
            max_new_tokens=sampling.max_new_tokens,
            min_new_tokens=sampling.min_new_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            top_p_decay=sampling.top_p_decay,
            top_p_min=sampling.top_p_min,
            top_p_reset_ids=list(sampling.top_p_reset_ids),
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            seed=sampling.seed,
            logit_bias=list(sampling.logit_bias.items()),
            bad_words=[list(ids) for ids in sampling.bad_words],
            stop_words=[list(ids) for ids in sampling.stop_words],
            stop_strings=[text.encode() for text in sampling.stop_strings],
            stop_token_ids=sorted({*eos, *sampling.stop_token_ids}),
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
            return_logits=sampling.return_logits,
            select_tokens=list(sampling.select_tokens),
            return_hidden_states=sampling.return_hidden_states,
        )

    def cancel(self, request: int) -> None:
        """The request's sequences end with "cancelled" at the next step; one that has ended already is left alone."""
        self.engine.cancel(request)

    def cancel_all(self) -> None:
        for request in list(self._jobs):
            self.engine.cancel(request)

    def close(self) -> None:
        """Ends the thread of the grammars; nothing may be submitted any more."""
        self._masks.close()

    def dispatch(self) -> None:
        """Hands all events since the last call, mostly those of one step, to their sinks."""
        news: list[tuple[Sink, _core.Event]] = []
        events = self.engine.poll()
        with self._lock:  # whoever submitted one of these has noted its sink by now
            for event in events:
                entry = self._jobs.get(event.request)
                if entry is None:
                    continue
                news.append((entry.sink, event))
                if event.finish:
                    entry.sequences -= 1
                    if entry.sequences == 0:
                        del self._jobs[event.request]
                        self._masks.forget(entry.grammar)
        for sink, event in news:
            _tell(sink, event)
        _tell(self.on_events, [event for _, event in news])


def _tell(hearer: Callable[[_T], None], news: _T) -> None:
    try:
        hearer(news)
    except Exception:  # the events behind this one have their hearers too
        log.exception("events were not taken")
