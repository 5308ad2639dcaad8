"""What every way in (raw HTTP, OpenAI routes, the library) translates a call into, and the error they all raise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from maga_transformer.structured.compiler import Compiled


class Fault(Enum):
    """What is wrong with a request; `server/errors.py` gives each its HTTP status and codes."""

    body = "body"  # not the JSON object that was expected
    no_prompt = "no_prompt"
    empty_prompt = "empty_prompt"
    long_prompt = "long_prompt"
    stop_list = "stop_list"
    parameter = "parameter"  # a value out of range or of the wrong type
    unsupported = "unsupported"  # a known field that cannot be honoured yet
    unknown_model = "unknown_model"
    no_key = "no_key"
    wrong_key = "wrong_key"  # a key that does not open this route
    too_large = "too_large"  # the body
    encoding = "encoding"  # of the body
    slow_body = "slow_body"
    not_found = "not_found"  # no such route
    method = "method"  # a route, but not for this method
    busy = "busy"
    draining = "draining"
    loading = "loading"
    update = "update"  # of what is served
    timeout = "timeout"
    cancelled = "cancelled"
    execution = "execution"  # the engine gave the sequence up
    internal = "internal"


class RequestError(Exception):
    """A request that cannot be served. `field` is the request's field at fault, as the caller spelt it."""

    def __init__(self, fault: Fault, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.fault = fault
        self.message = message
        self.field = field


def long_prompt(context: int, tokens: int) -> RequestError:
    return RequestError(
        Fault.long_prompt,
        f"This model's maximum context length is {context} tokens, and one of them must be left for the "
        f"answer, but the prompt has {tokens} tokens",
        "prompt",
    )


@dataclass(frozen=True, kw_only=True)
class Beams:
    """Beam search instead of drawing: `BeamParams` of cpp/engine/request.h."""

    width: int
    length_penalty: float = 1.0
    stop: Literal["heuristic", "first", "never"] = "heuristic"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How an output is drawn and where it ends. Ranges and meaning: `SamplingParams` of cpp/engine/request.h."""

    max_new_tokens: int | None = None  # None: as many as fit; 0: none, with prompt_logprobs
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    top_p_decay: float = 1.0
    top_p_min: float = 1e-6
    top_p_reset_ids: Sequence[int] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[Sequence[int]] = ()
    stop_words: Sequence[Sequence[int]] = ()
    stop_strings: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    eos_ids: Sequence[int] | None = None  # None: the tokenizer's
    logprobs: int = -1  # -1: none, 0: of the chosen token, n: and of the n most likely
    prompt_logprobs: int = -1  # the same of every token of the prompt but the first
    return_logits: bool = False  # what each token was chosen from
    select_tokens: Sequence[int] = ()  # of which tokens; empty: of all
    return_hidden_states: bool = False
    rare: Mapping[str, Any] = field(default_factory=dict)  # of `RareSamplers`, by name; what is not there is off
    beams: Beams | None = None
    keep_stop: bool = False  # the stop word stays in the text
    keep_special: frozenset[int] = frozenset()  # special tokens that stay in the text all the same
    skip_special_tokens: bool = True


@dataclass(frozen=True, kw_only=True)
class Job:
    """One prompt for the engine."""

    prompt: Sequence[int]
    sampling: Sampling
    sequences: int = 1
    priority: int = 0
    timeout_seconds: float = 0.0
    cache_salt: str = ""
    grammar: Compiled | None = None  # what every output must follow
    segment_start: int | None = None  # of a prompt that is embedded: where its second text begins


def quote(value: Any) -> str:
    """A value for an error message: short, and safe to print."""
    text = repr(value)
    return text if len(text) <= 64 else text[:61] + "..."
