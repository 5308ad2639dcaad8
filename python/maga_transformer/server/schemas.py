"""OpenAI's request bodies. Null is absent; a known field that cannot be honoured is refused by name; an unknown one is ignored,
named in the log and in the X-Maga-Ignored header, because common clients send dozens of other servers' fields."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from maga_transformer import samplers
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
from maga_transformer.request import Beams, Fault, RequestError, Sampling
from maga_transformer.samplers import SamplerFields
from maga_transformer.structured.grammar import FIELDS, Grammar, from_fields

log = logging.getLogger(__name__)

# Known fields that cannot be honoured yet -> values that ask for nothing.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "guided_whitespace_pattern": ("",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "store": (False,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "kv_transfer_params": (),
    "prompt_embeds": (),
}
# Labels for the caller's own use, and choices between things that are the same here.
NO_EFFECT = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "service_tier",
        "request_id",
        "verbosity",
        "guided_decoding_backend",
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


def _zero_is_none(value: object) -> object:
    return None if value == 0 and value is not False else value


def _no_limit(value: object) -> object:
    """LM Studio's users write -1 for as many as fit."""
    return UNLIMITED if value == -1 and not isinstance(value, bool) else value


def _printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError("1 to 256 printable characters")
    return value


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


UNLIMITED = (1 << 31) - 1
TokenLimit = Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(_no_limit)]  # 0: only what was asked of the prompt


class OpenAIRequest(SamplerFields):
    """The fields that chat and completions share. Ranges are OpenAI's where it has some."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)
    default_max_tokens: ClassVar[int | None] = None  # None: as many as fit
    refused: ClassVar[Mapping[str, tuple[object, ...]]] = UNSUPPORTED  # unless neutral
    no_effect: ClassVar[frozenset[str]] = NO_EFFECT

    model: str | None = None
    max_tokens: TokenLimit = None
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
    cache_salt: Annotated[str, AfterValidator(_printable)] | None = Field(None, min_length=1, max_length=256)
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = Field(None, ge=1, le=MAX_SEQUENCES)
    use_beam_search: bool | None = None
    length_penalty: Finite | None = Field(None, ge=-1e3, le=1e3)
    early_stopping: bool | Literal["never"] | None = None
    truncate_prompt_tokens: Annotated[Annotated[int, Field(ge=-1)] | None, BeforeValidator(_zero_is_none)] = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    # What the answer must look like: OpenAI's, vLLM's, llama.cpp's. structured/grammar.py checks them.
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structural_tag: Any = None
    json_schema: Any = None
    grammar_text: Any = Field(None, alias="grammar")
    grammar_string: Any = None

    @property
    def outputs(self) -> int:
        """Choices of the answer, for each prompt."""
        return self.n or 1

    @property
    def sequences(self) -> int:
        """What is generated for each prompt: with best_of, the best of them are answered."""
        return self.outputs if self.use_beam_search else max(self.outputs, self.best_of or 1)

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

    def prompt_logprob_count(self) -> int:
        return -1 if self.prompt_logprobs is None else self.prompt_logprobs

    def beams(self) -> Beams | None:
        width = max(self.outputs, self.best_of or 1)
        if not self.use_beam_search:
            return None
        if width == 1:
            raise RequestError(Fault.parameter, "use_beam_search needs n or best_of, the number of beams, of 2 or more", "best_of")
        if self.logprob_count() >= 0:
            raise RequestError(Fault.unsupported, "logprobs: a beam search has none; leave it out", "logprobs")
        own = {name: getattr(self, name) for name in self.model_fields_set}
        penalty = 1.0 if self.length_penalty is None else self.length_penalty
        return samplers.beams(width, penalty, self.early_stopping or False, own, samplers.DRAWING)

    def grammar(self) -> Grammar | None:
        fields = {name: getattr(self, name, None) for name in ("response_format", "structured_outputs", *FIELDS)}
        return from_fields({**fields, "grammar": self.grammar_text})

    def sampling(
        self, defaults: Mapping[str, Any], bad_words: Sequence[Sequence[int]], keep_special: frozenset[int] = frozenset()
    ) -> Sampling:
        """`defaults`: the operator's generation_config.json, under what the request says."""
        limit = self.token_limit()
        if limit is None:
            limit = defaults.get("max_new_tokens") or self.default_max_tokens
        logprobs, prompt_logprobs = self.logprob_count(), self.prompt_logprob_count()
        if self.sequences > self.outputs:
            logprobs = max(logprobs, 0)  # to find the best
        if limit == 0:
            prompt_logprobs = max(prompt_logprobs, 0)

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
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            rare=self.rare(),
            beams=self.beams(),
            keep_stop=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
            keep_special=keep_special,
        )


class ChatRequest(OpenAIRequest):
    messages: list[Any] | None = None
    max_completion_tokens: TokenLimit = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Any = None  # server/tools.py checks them
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    # RTP-LLM's; server/rtp_chat.py.
    extra_configs: dict[str, Any] | None = None
    debug_info: bool | None = None
    aux_info: bool | None = None
    template_key: str | None = None
    user_template: str | None = None

    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def logprob_count(self) -> int:
        return (self.top_logprobs or 0) if self.logprobs else -1


class CompletionRequest(OpenAIRequest):
    default_max_tokens: ClassVar[int | None] = 16

    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)

    def logprob_count(self) -> int:
        return -1 if self.logprobs is None else self.logprobs

    def prompt_logprob_count(self) -> int:
        echoed = self.logprob_count() if self.echo else -1
        return max(super().prompt_logprob_count(), echoed)


CHAT_ONLY = frozenset(ChatRequest.model_fields) - frozenset(CompletionRequest.model_fields) - {"messages"}
CompletionRequest.refused = {**UNSUPPORTED, **dict.fromkeys(sorted(CHAT_ONLY), ([], {}, "", False, "none", "auto"))}
Body = TypeVar("Body", bound=OpenAIRequest)


def parse(kind: type[Body], body: Mapping[str, Any], *, strict: bool = False) -> tuple[Body, list[str]]:
    """The request, and the names of the fields that were ignored; `strict` refuses those."""
    fields: dict[str, Any] = {}
    for name, value in samplers.renamed(body).items():
        if value is None or name in kind.no_effect:
            continue
        if name in kind.refused:
            refuse_unless_neutral(name, value, kind.refused[name])
            continue
        fields[name] = value
    request = validate(kind, fields)
    if request.stream_options is not None and not request.stream:
        raise RequestError(Fault.parameter, "stream_options needs stream: true", "stream_options")
    _check(request)
    ignored = [name for name in (request.model_extra or {}) if name.isidentifier() and name.isascii()][:32]
    if ignored and strict:
        raise RequestError(Fault.parameter, f"unknown field {ignored[0][:64]} (--strict)", ignored[0])
    if ignored:
        log.info("ignored unknown fields of a request: %s", ", ".join(ignored))
    return request, ignored


def _check(request: OpenAIRequest) -> None:
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise RequestError(Fault.parameter, f"top_logprobs={request.top_logprobs} needs logprobs: true", "logprobs")
    if request.stream and request.sequences > request.outputs:
        raise RequestError(
            Fault.parameter, f"best_of={request.best_of}: a stream cannot wait for the best; leave one out", "best_of"
        )
    if request.best_of is not None and request.best_of < request.outputs:
        raise RequestError(Fault.parameter, f"best_of={request.best_of}: at least n, which is {request.outputs}", "best_of")
    if request.stream and request.prompt_logprobs is not None:
        raise RequestError(Fault.parameter, "prompt_logprobs are not streamed; leave one of them out", "prompt_logprobs")
    if not request.use_beam_search:
        samplers.refuse_beam_fields(request.length_penalty, request.early_stopping, "use_beam_search")
    echo = isinstance(request, CompletionRequest) and request.echo
    name = "max_tokens" if request.max_tokens == request.token_limit() else "max_completion_tokens"
    if request.token_limit() == 0 and not (echo or request.prompt_logprobs is not None):
        raise RequestError(Fault.parameter, f"{name}=0: at least 1, unless echo or prompt_logprobs ask for the prompt", name)
