"""RTP-LLM's generate_config: the fields of the raw route and the keywords of `LLM.generate`. Every field is honoured or refused."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar
from uuid import uuid4

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError

from maga_transformer import samplers
from maga_transformer.request import Beams, Fault, RequestError, Sampling, quote
from maga_transformer.structured.grammar import Grammar, from_fields

Model = TypeVar("Model", bound=BaseModel)

MAX_SEQUENCES = 1024
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024

# Known fields that cannot be honoured yet -> values that ask for nothing.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "variable_num_beams": ([],),
    "bos_token_id": (),
    "using_hf_sampling": (False,),
    "task_id": (0, ""),
    "return_prompt_logits": (False,),
    "return_all_hidden_states": (False,),
    "logits_index": (),
    "return_all_probs": (False, 0),
    "adapter_name": ("", []),
    "custom_prop": ("{}", ""),
    "md5_value": ("",),
    "max_input_tokens": (32000,),
    "max_thinking_tokens": (32000,),
    "end_think_token_ids": ([],),
    "in_think_mode": (False,),
    "sp_advice_prompt": ("",),
    "sp_advice_prompt_token_ids": ([],),
    "sp_edit": (False,),
    "gen_timeline": (False,),
    "is_streaming": (False,),
    "resized_shape": ([],),
    "tool_call_message_extract_strategy": ("default",),
    "global_request_id": (-1,),
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
        "pad_token_id",
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
    **samplers.ALIASES,
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
    """JSON has only text keys: those that are ids become integers."""
    if not isinstance(value, dict):
        return value
    wrong = next((key for key in value if isinstance(key, str) and not (key.isdecimal() and len(key) < 19)), None)
    if wrong is not None:
        raise ValueError(f"the key {quote(wrong)} is no token id")
    return {int(key) if isinstance(key, str) else key: bias for key, bias in value.items()}


StopStrings = Annotated[list[str], AfterValidator(_stop_strings)]
IdLists = Annotated[list[Annotated[list[int], Field(max_length=4096)]], AfterValidator(_id_lists)]
LogitBias = Annotated[dict[int, Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)]], BeforeValidator(_bias)]
TopK = Annotated[int, BeforeValidator(samplers.zero_for_minus_one), Field(ge=0)]
Finite = samplers.Finite
Seed = Annotated[int, Field(ge=-1, lt=1 << 64)]


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, int) and not isinstance(value, bool) else value


Ids = Annotated[list[int], BeforeValidator(_one_or_many), Field(max_length=1024)]


class GenerateConfig(samplers.SamplerFields):
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
    top_p_decay: Finite = Field(1.0, gt=0, le=1)
    top_p_min: Finite = Field(1e-6, gt=0, le=1)
    top_p_reset_ids: Ids = Field(default_factory=list)
    num_beams: int = Field(1, ge=0, le=MAX_SEQUENCES)
    length_penalty: Finite = Field(1.0, ge=-1e3, le=1e3)
    early_stopping: bool | Literal["never"] = False
    eos_token_id: Ids | None = None
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
    prompt_logprobs: int = Field(-1, ge=-1, le=20)
    calculate_loss: Annotated[Literal[0, 1, 2], BeforeValidator(samplers.no_switch)] = 0
    return_logits: bool = False
    select_tokens_id: Ids = Field(default_factory=list)
    select_tokens_str: list[str] = Field(default_factory=list, max_length=1024)
    return_hidden_states: bool = False
    return_softmax_probs: bool = False
    return_input_ids: bool = False
    return_output_ids: bool = False
    return_incremental: bool = False
    yield_generator: bool = False
    request_format: str = Field("raw", pattern="^(raw|chatapi)$")
    # What the answer must look like; structured/grammar.py checks them.
    response_format: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None

    _given: frozenset[str] = PrivateAttr(frozenset())  # fields that the request itself has

    @classmethod
    def parse(cls, fields: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> GenerateConfig:
        """Null means absent. Raises RequestError naming the field."""
        given: dict[str, Any] = dict(defaults or {})
        spellings: dict[str, str] = {}
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
            if name in spellings and given[name] != value:
                message = f"{spellings[name]} and {spelt} are the same field with two values; keep one"
                raise RequestError(Fault.parameter, message, spelt)
            given[name], spellings[name] = value, spelt
        if given.get("timeout_ms") == 0:
            raise RequestError(Fault.parameter, "timeout_ms=0: a positive number of milliseconds, or -1 for no limit", "timeout_ms")
        config = validate(cls, given, _fault, spellings)
        config._given = frozenset(given) - (frozenset(defaults or {}) - {ALIASES.get(name, name) for name in fields})
        return config

    def sampling(self, select: Sequence[int] = ()) -> Sampling:
        """`select`: the tokens of select_tokens_str."""
        return Sampling(
            max_new_tokens=self.max_new_tokens,
            min_new_tokens=self.min_new_tokens,
            temperature=self.temperature if self.do_sample else 0.0,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            top_p_decay=self.top_p_decay,
            top_p_min=self.top_p_min,
            top_p_reset_ids=self.top_p_reset_ids,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.random_seed if self.random_seed != -1 else None,
            logit_bias=self.logit_bias,
            bad_words=self.bad_words_list,
            stop_words=self.stop_words_list,
            stop_strings=self.stop_words_str,
            ignore_eos=self.ignore_eos,
            eos_ids=self.eos_token_id,
            logprobs=self.logprobs,
            prompt_logprobs=max(self.prompt_logprobs, 0) if self.calculate_loss else self.prompt_logprobs,
            return_logits=self.return_logits,
            select_tokens=[*self.select_tokens_id, *select],
            return_hidden_states=self.return_hidden_states,
            rare=self.rare(),
            beams=self._beams(),
            keep_stop=self.print_stop_words,
            skip_special_tokens=self.skip_special_tokens,
        )

    def grammar(self) -> Grammar | None:
        names = ("response_format", "json_schema", "regex", "ebnf", "structural_tag")
        return from_fields({name: getattr(self, name) for name in names})

    def _beams(self) -> Beams | None:
        if self.num_beams < 2:
            samplers.refuse_beam_fields(self.length_penalty, self.early_stopping, "num_beams")
            return None
        if self.num_return_sequences > 1:
            message = f"num_return_sequences={self.num_return_sequences}: with num_beams every beam is returned; leave it out"
            raise RequestError(Fault.unsupported, message, "num_return_sequences")
        for name in ("return_logits", "return_hidden_states", "return_softmax_probs"):
            if getattr(self, name):
                raise RequestError(Fault.unsupported, f"{name}: a beam search has none; leave it out", name)
        own = {name: getattr(self, name) for name in self._given}
        return samplers.beams(self.num_beams, self.length_penalty, self.early_stopping, own, samplers.DRAWING)

    @property
    def given(self) -> frozenset[str]:
        """The fields that the request itself has."""
        return self._given

    @property
    def sequences(self) -> int:
        """Outputs of a prompt: every beam is one."""
        return self.num_beams if self.num_beams > 1 else max(1, self.num_return_sequences)

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


def validate(
    model: type[Model],
    fields: Mapping[str, Any],
    fault: Callable[[str], Fault] = lambda _: Fault.parameter,
    spellings: Mapping[str, str] = MappingProxyType({}),
) -> Model:
    """`model(**fields)`, with the first mistake raised as a RequestError that names the field, as `spellings` has it."""
    try:
        return model.model_validate(dict(fields))
    except ValidationError as error:
        first = error.errors()[0]
        # Parts that are no key or index (the branch of a union) say nothing to the caller.
        path = [part for part in first["loc"] if isinstance(part, int) or str(part).isidentifier()]
        if path and first["loc"][0] == path[0]:
            path[0] = spellings.get(str(path[0]), path[0])
        name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".") or "body"
        message = str(first["msg"]).removeprefix("Value error, ")
        message = f"{name}: {message}" if first["type"] == "missing" else f"{name}={quote(first['input'])}: {message}"
        raise RequestError(fault(str(first["loc"][0]) if first["loc"] else ""), message, name) from None
