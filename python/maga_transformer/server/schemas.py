"""OpenAI's request bodies. Null is absent; a known field that cannot be honoured is refused by name; an unknown one is ignored,
named in the log and in the X-Maga-Ignored header, because common clients send dozens of other servers' fields."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from maga_transformer.generate_config import (
    MAX_SEQUENCES,
    Finite,
    LogitBias,
    Seed,
    StopStrings,
    TopK,
    refuse_unless_neutral,
    validate,
)
from maga_transformer.request import Fault, RequestError, Sampling

log = logging.getLogger(__name__)

# Known fields that cannot be honoured yet -> values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"}, {}),
    "structured_outputs": ({},),
    "guided_json": ("", {}),
    "guided_regex": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "grammar": ("",),
    "json_schema": ("", {}),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "web_search_options": (),
    "store": (False,),
    "suffix": ("",),
    "prompt_logprobs": (),
    "allowed_token_ids": ([],),
    "truncate_prompt_tokens": (-1, 0),
    "continue_final_message": (False,),
    "chat_template": ("",),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "thinking_token_budget": (),
    "kv_transfer_params": (),
    "use_beam_search": (False,),
    "length_penalty": (1.0, 1),
    "early_stopping": (False,),
    "extra_configs": ({},),
    "debug_info": (False,),
    "aux_info": (False,),
    "typical_p": (1.0, 1),
    "tfs": (1.0, 1),
    "top_a": (0.0, 0),
    "mirostat_mode": (0,),
    "xtc_probability": (0.0, 0),
    "dry_multiplier": (0.0, 0),
    "smoothing_factor": (0.0, 0),
    "epsilon_cutoff": (0.0, 0),
    "eta_cutoff": (0.0, 0),
    "nsigma": (0.0, 0),
    "prompt_embeds": (),
}
# Labels for the caller's own use, and choices between things that are the same here.
_NO_EFFECT = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "service_tier",
        "request_id",
        "verbosity",
        "parallel_tool_calls",
        "spaces_between_special_tokens",
        "private_request",
        "trace_id",
        "chat_id",
        "extend_fields",
    }
)


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


class OpenAIRequest(BaseModel):
    """The fields that chat and completions share. Ranges are OpenAI's where it has some."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)
    default_max_tokens: ClassVar[int | None] = None  # None: as many as fit

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1, le=MAX_SEQUENCES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Annotated[StopStrings, BeforeValidator(_one_or_many)] | None = None
    temperature: Finite | None = Field(None, ge=0, le=1e6)
    top_p: Finite | None = Field(None, ge=0, le=1)
    presence_penalty: Finite | None = Field(None, ge=-2, le=2)
    frequency_penalty: Finite | None = Field(None, ge=-2, le=2)
    logit_bias: LogitBias | None = None
    seed: Seed | None = None
    # As in vLLM.
    top_k: TopK | None = None
    min_p: Finite | None = Field(None, ge=0, le=1)
    repetition_penalty: Finite | None = Field(None, gt=0, le=1e6)
    min_tokens: int | None = Field(None, ge=0)
    stop_token_ids: list[int] | None = Field(None, max_length=1024)
    bad_words: StopStrings | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = Field(None, ge=-(1 << 31), lt=1 << 31)
    cache_salt: str | None = Field(None, min_length=1, max_length=256)

    @property
    def sequences(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def token_limit(self) -> int | None:
        return self.max_tokens

    def logprob_count(self) -> int:
        return -1

    def sampling(self, defaults: Mapping[str, Any], bad_words: Sequence[Sequence[int]]) -> Sampling:
        """`defaults`: the operator's generation_config.json, under what the request says."""
        limit = self.token_limit() or defaults.get("max_new_tokens") or self.default_max_tokens

        def pick(value: float | None, name: str, otherwise: float) -> float:
            return value if value is not None else float(defaults.get(name, otherwise))

        temperature = self.temperature
        if temperature is None and defaults.get("do_sample") is False:
            temperature = 0.0
        return Sampling(
            max_new_tokens=limit,
            min_new_tokens=self.min_tokens or 0,
            temperature=pick(temperature, "temperature", 1.0),
            top_k=int(pick(self.top_k, "top_k", 0)),
            top_p=pick(self.top_p, "top_p", 1.0),
            min_p=pick(self.min_p, "min_p", 0.0),
            repetition_penalty=pick(self.repetition_penalty, "repetition_penalty", 1.0),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            seed=self.seed if self.seed != -1 else None,
            logit_bias=self.logit_bias or {},
            bad_words=bad_words,
            stop_strings=self.stop or [],
            stop_token_ids=self.stop_token_ids or [],
            ignore_eos=bool(self.ignore_eos),
            logprobs=self.logprob_count(),
            keep_stop=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
        )


class ChatRequest(OpenAIRequest):
    messages: list[Any] | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    add_generation_prompt: bool | None = None

    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def logprob_count(self) -> int:
        return (self.top_logprobs or 0) if self.logprobs else -1


class CompletionRequest(OpenAIRequest):
    default_max_tokens: ClassVar[int | None] = 16

    prompt: Any = None
    echo: bool | None = None
    best_of: int | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    add_special_tokens: bool | None = None

    def logprob_count(self) -> int:
        return -1 if self.logprobs is None else self.logprobs


Body = TypeVar("Body", bound=OpenAIRequest)


def parse(kind: type[Body], body: Mapping[str, Any]) -> tuple[Body, list[str]]:
    """The request, and the names of the fields that were ignored."""
    fields: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or name in _NO_EFFECT or (name == "tools" and body.get("tool_choice") == "none"):
            continue
        if name in _UNSUPPORTED:
            refuse_unless_neutral(name, value, _UNSUPPORTED[name])
            continue
        fields[name] = value
    request = validate(kind, fields)
    if request.stream_options is not None and not request.stream:
        raise RequestError(Fault.parameter, "stream_options needs stream: true", "stream_options")
    _check(request)
    ignored = [name for name in (request.model_extra or {}) if name.isidentifier() and name.isascii()][:32]
    if ignored:
        log.info("ignored unknown fields of a request: %s", ", ".join(ignored))
    return request, ignored


def _check(request: OpenAIRequest) -> None:
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise RequestError(Fault.parameter, f"top_logprobs={request.top_logprobs} needs logprobs: true", "logprobs")
    if isinstance(request, CompletionRequest):
        if request.best_of is not None and request.best_of != request.sequences:
            raise RequestError(
                Fault.unsupported,
                f"best_of={request.best_of} is not supported yet; valid: the value of n, or leave it out",
                "best_of",
            )
        if request.echo and request.logprobs is not None:
            raise RequestError(Fault.unsupported, "echo together with logprobs is not supported yet; leave one of them out", "echo")
