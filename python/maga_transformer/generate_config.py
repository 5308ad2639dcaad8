"""RTP-LLM's generate_config: the fields of the raw route and the keywords of `LLM.generate`. Every field is honoured or refused."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar
from uuid import uuid4

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from maga_transformer.request import Fault, RequestError, Sampling, quote

Model = TypeVar("Model", bound=BaseModel)

MAX_SEQUENCES = 1024
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024

# Known fields that cannot be honoured yet -> values that ask for nothing.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "num_beams": (1, 0),
    "variable_num_beams": ([],),
    "top_p_decay": ([],),
    "top_p_min": ([],),
    "top_p_reset_ids": ([],),
    "eos_token_id": (),
    "pad_token_id": (),
    "bos_token_id": (),
    "using_hf_sampling": (False,),
    "task_id": (0, ""),
    "calculate_loss": (0,),
    "return_logits": (False,),
    "return_prompt_logits": (False,),
    "select_tokens_id": ([],),
    "select_tokens_str": ([],),
    "return_hidden_states": (False,),
    "return_all_hidden_states": (False,),
    "logits_index": (),
    "return_all_probs": (False, 0),
    "return_softmax_probs": (False,),
    "adapter_name": ("", []),
    "custom_prop": ("{}", ""),
    "md5_value": ("",),
    "max_input_tokens": (32000,),
    "max_thinking_tokens": (32000,),
    "end_think_token_ids": ([],),
    "in_think_mode": (False,),
    "no_repeat_ngram_size": (0,),
    "sp_advice_prompt": ("",),
    "sp_advice_prompt_token_ids": ([],),
    "sp_edit": (False,),
    "gen_timeline": (False,),
    "is_streaming": (False,),
    "resized_shape": ([],),
    "tool_call_message_extract_strategy": ("default",),
    "global_request_id": (-1,),
    "response_format": (),
    "json_schema": ("",),
    "regex": ("",),
    "ebnf": ("",),
    "structural_tag": ("",),
    "ttft_timeout_ms": (-1,),
    "chat_template_kwargs": ({},),
    "combo_token_size": (0,),
    "banned_combo_token_ids": ([],),
    "min_pixels": (),
    "max_pixels": (),
    "fps": (),
    "qos_priority": (0,),
}
# Fields that ask for what always holds here, whatever their value, or that only mark a log line.
NO_EFFECT = frozenset(
    {
        "chat_id",
        "trace_id",
        "can_use_pd_separation",
        "force_disable_sp_run",
        "return_cum_log_probs",
        "enable_device_cache",
        "enable_memory_cache",
        "enable_remote_cache",
    }
)
ALIASES = {
    "gen_length": "max_new_tokens",
    "output_logits": "return_logits",
    "output_hidden_states": "return_hidden_states",
    "output_input_ids": "return_input_ids",
    "seed": "random_seed",
}


def _stop_strings(value: list[str]) -> list[str]:
    if len(value) > MAX_STOP_STRINGS:
        raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings, not {len(value)}")
    for text in value:
        if len(text) > MAX_STOP_LENGTH:
            raise ValueError(f"a stop string has at most {MAX_STOP_LENGTH} characters, not {len(text)}")
    return [text for text in value if text]  # an empty string stops nothing


def _id_lists(value: list[list[int]]) -> list[list[int]]:
    if len(value) > MAX_STOP_LENGTH:
        raise ValueError(f"at most {MAX_STOP_LENGTH} token sequences, not {len(value)}")
    if any(not ids for ids in value):
        raise ValueError("a token sequence must not be empty")
    return value


def _bias(value: object) -> object:
    """JSON has only text keys: those that are ids become integers, others stay for the type check to name."""
    if not isinstance(value, dict):
        return value
    return {int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 19 else key: bias for key, bias in value.items()}


def _off(value: object) -> object:
    return 0 if value == -1 and not isinstance(value, bool) else value


StopStrings = Annotated[list[str], AfterValidator(_stop_strings)]
IdLists = Annotated[list[Annotated[list[int], Field(max_length=4096)]], AfterValidator(_id_lists)]
LogitBias = Annotated[dict[int, Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)]], BeforeValidator(_bias)]
TopK = Annotated[int, BeforeValidator(_off), Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=-1, lt=1 << 64)]


class GenerateConfig(BaseModel):
    """Defaults are RTP-LLM's. Lengths in tokens, times in ms."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    max_new_tokens: int = Field(1000, ge=1)
    min_new_tokens: int = Field(0, ge=0)
    top_k: TopK = 0
    top_p: Finite = Field(0.95, ge=0, le=1)
    min_p: Finite = Field(0.0, ge=0, le=1)
    temperature: Finite = Field(1.0, ge=0, le=1e6)
    do_sample: bool = True
    repetition_penalty: Finite = Field(1.0, gt=0, le=1e6)
    presence_penalty: Finite = Field(0.0, ge=-2, le=2)
    frequency_penalty: Finite = Field(0.0, ge=-2, le=2)
    random_seed: Seed | None = None
    logit_bias: LogitBias = Field(default_factory=dict)
    bad_words_list: IdLists = Field(default_factory=list)
    stop_words_str: StopStrings = Field(default_factory=list)
    stop_words_list: IdLists = Field(default_factory=list)
    print_stop_words: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    num_return_sequences: int = Field(0, ge=0, le=MAX_SEQUENCES)
    timeout_ms: int = Field(-1, ge=-1, le=10**11)
    reuse_cache: bool = True
    logprobs: int = Field(-1, ge=-1, le=20)
    return_input_ids: bool = False
    return_output_ids: bool = False
    return_incremental: bool = False
    yield_generator: bool = False
    request_format: str = Field("raw", pattern="^(raw|chatapi)$")

    @classmethod
    def parse(cls, fields: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> GenerateConfig:
        """Null means absent. Raises RequestError naming the field."""
        given: dict[str, Any] = dict(defaults or {})
        for spelt, value in fields.items():
            name = ALIASES.get(spelt, spelt)
            if value is None or name in NO_EFFECT:
                continue
            if name in UNSUPPORTED:
                refuse_unless_neutral(spelt, value, UNSUPPORTED[name])
                continue
            if name not in cls.model_fields:
                close = difflib.get_close_matches(name, cls.model_fields, n=1)
                raise RequestError(
                    Fault.parameter, f"unknown field {quote(spelt)}" + (f"; did you mean {close[0]}?" if close else ""), spelt
                )
            given[name] = value
        if given.get("timeout_ms") == 0:
            raise RequestError(Fault.parameter, "timeout_ms=0: a positive number of milliseconds, or -1 for no limit", "timeout_ms")
        return validate(cls, given, _fault)

    def sampling(self) -> Sampling:
        return Sampling(
            max_new_tokens=self.max_new_tokens,
            min_new_tokens=self.min_new_tokens,
            temperature=self.temperature if self.do_sample else 0.0,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.random_seed if self.random_seed != -1 else None,
            logit_bias=self.logit_bias,
            bad_words=self.bad_words_list,
            stop_words=self.stop_words_list,
            stop_strings=self.stop_words_str,
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
            keep_stop=self.print_stop_words,
            skip_special_tokens=self.skip_special_tokens,
        )

    @property
    def cache_salt(self) -> str:
        """A salt of its own shares no pages."""
        return "" if self.reuse_cache else uuid4().hex

    @property
    def timeout_seconds(self) -> float:
        return self.timeout_ms / 1000 if self.timeout_ms > 0 else 0.0


def refuse_unless_neutral(name: str, value: object, neutral: tuple[object, ...]) -> None:
    """`1` is not `True` here: a neutral value has the neutral value's type."""
    if any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in neutral):
        return
    valid = f"; valid: {', '.join(repr(known) for known in neutral)}, or leave it out" if neutral else "; leave it out"
    raise RequestError(Fault.unsupported, f"{name}={quote(value)} is not supported yet{valid}", name)


def _fault(name: str) -> Fault:
    return Fault.stop_list if name in ("stop_words_str", "stop_words_list") else Fault.parameter


def validate(model: type[Model], fields: Mapping[str, Any], fault: Callable[[str], Fault] = lambda _: Fault.parameter) -> Model:
    """`model(**fields)`, with the first mistake raised as a RequestError that names the field and its value."""
    try:
        return model.model_validate(dict(fields))
    except ValidationError as error:
        first = error.errors()[0]
        # Parts that are no key or index (the branch of a union) say nothing to the caller.
        path = [part for part in first["loc"] if isinstance(part, int) or str(part).isidentifier()]
        name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".") or "body"
        message = str(first["msg"]).removeprefix("Value error, ")
        message = f"{name}: {message}" if first["type"] == "missing" else f"{name}={quote(first['input'])}: {message}"
        raise RequestError(fault(str(first["loc"][0]) if first["loc"] else ""), message, name) from None
