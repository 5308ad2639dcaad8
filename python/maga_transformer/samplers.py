"""The sampling fields that few requests send, by Aphrodite's and vLLM's names, for every route; and beam search's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from maga_transformer.request import Beams, Fault, RequestError

Finite = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[Finite, Field(ge=0, le=1)]
Positive = Annotated[Finite, Field(ge=0, le=1e6)]
Cutoff = Annotated[Finite, Field(ge=0, le=9999)]  # in units of 1e-4
TokenIds = Annotated[list[int], Field(max_length=1 << 16)]

# The stages of sampler_priority, by Aphrodite's numbers.
STAGES = (
    "top_p_top_k",
    "top_a",
    "min_p",
    "tfs",
    "typical_p",
    "temperature",
    "penalties",
    "dry",
    "no_repeat_ngram",
    "top_nsigma",
    "eta_cutoff",
    "epsilon_cutoff",
    "quadratic",
    "xtc",
)
# Other spellings, of Aphrodite too.
ALIASES = {
    "dry_penalty_last_n": "dry_range",
    "sampler_order": "sampler_priority",
    "typical": "typical_p",
}
# What these fields are called in the engine.
_ENGINE_NAMES = {
    "custom_token_bans": "token_bans",
    "allowed_token_ids": "allowed_tokens",
}


def _breakers(value: object) -> object:
    """Kobold's clients send the list as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value) if value.strip() else []
    except orjson.JSONDecodeError:
        raise ValueError("a list of texts, or one as JSON text") from None


def _stage(value: object) -> object:
    if isinstance(value, str) and value.lower() in STAGES:
        return STAGES.index(value.lower())
    if isinstance(value, str) or (isinstance(value, int) and not 0 <= value < len(STAGES)):
        raise ValueError(f"no stage; valid: 0 to {len(STAGES) - 1}, or {', '.join(STAGES)}")
    return value


def _once(value: list[int]) -> list[int]:
    if len(set(value)) < len(value):
        raise ValueError("a stage stands there twice")
    return value


def no_switch(value: object) -> object:
    """A Literal of numbers takes true for 1."""
    if isinstance(value, bool):
        raise ValueError("a number, not a boolean")
    return value


def zero_for_minus_one(value: object) -> object:
    """Clients spell no limit either way."""
    return 0 if value == -1 and not isinstance(value, bool) else value


def _range(value: object) -> object:
    if not isinstance(value, list) or len(value) != 3 or not isinstance(value[0], list):
        raise ValueError("must be [[token ids], start, length]")
    return tuple(value)


Place = Annotated[int, Field(ge=0, lt=1 << 31)]
BanRange = Annotated[tuple[TokenIds, Place, Place], BeforeValidator(_range)]
Text = Annotated[str, Field(max_length=256)]


class SamplerFields(BaseModel):
    """Every default means off. Formulas: cpp/decode/truncate.h and repeat.h."""

    top_a: Share = 0.0
    tfs: Share = 1.0
    typical_p: Share = 1.0
    epsilon_cutoff: Cutoff = 0.0
    eta_cutoff: Cutoff = 0.0
    nsigma: Positive = 0.0
    dynatemp_min: Positive = 0.0
    dynatemp_max: Positive = 0.0
    dynatemp_exponent: Positive = 1.0
    temperature_last: bool = False
    smoothing_factor: Positive = 0.0
    smoothing_curve: Annotated[Finite, Field(ge=1, le=1e6)] = 1.0
    skew: Annotated[Finite, Field(ge=-20, le=20)] = 0.0
    xtc_probability: Share = 0.0
    xtc_threshold: Share = 0.1
    mirostat_mode: Annotated[Literal[0, 2], BeforeValidator(no_switch)] = 0
    mirostat_tau: Positive = 5.0
    mirostat_eta: Positive = 0.1
    no_repeat_ngram_size: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    dry_multiplier: Positive = 0.0
    dry_base: Annotated[Finite, Field(ge=1, le=1e6)] = 1.75
    dry_allowed_length: Annotated[int, Field(ge=1, lt=1 << 31)] = 2
    dry_range: Annotated[int, BeforeValidator(zero_for_minus_one), Field(ge=0, lt=1 << 31)] = 0
    dry_sequence_breakers: Annotated[list[Text], BeforeValidator(_breakers), Field(max_length=256)] = ["\n", ":", '"', "*"]
    custom_token_bans: TokenIds = []
    token_ban_ranges: Annotated[list[BanRange], Field(max_length=1024)] = []
    allowed_token_ids: TokenIds = []
    sampler_priority: Annotated[list[Annotated[int, BeforeValidator(_stage)]], AfterValidator(_once)] = []

    def rare(self) -> dict[str, Any]:
        """Those that say more than their defaults, by the engine's names; breakers are texts still."""
        if self.dynatemp_min > self.dynatemp_max:
            message = f"dynatemp_min={self.dynatemp_min}: at most dynatemp_max, which is {self.dynatemp_max}"
            raise RequestError(Fault.parameter, message, "dynatemp_min")
        given = {name: getattr(self, name) for name in SamplerFields.model_fields}
        if self.dry_multiplier == 0:
            for name in ("dry_base", "dry_allowed_length", "dry_range", "dry_sequence_breakers"):
                del given[name]
        return {
            _ENGINE_NAMES.get(name, name): value
            for name, value in given.items()
            if name == "dry_sequence_breakers" or value != SamplerFields.model_fields[name].default
        }


def renamed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """With the names that these fields have here. A field that is given under both keeps the proper one's value."""
    return {ALIASES.get(name, name): value for name, value in fields.items() if ALIASES.get(name) not in fields}


def beams(
    width: int,
    length_penalty: float,
    early_stopping: bool | str,
    given: Mapping[str, object],
    neutral: Mapping[str, Sequence[object]],
) -> Beams:
    """`given`: the fields that the request itself sent. A beam search draws nothing, so those of `neutral` may only say so."""
    for name, values in neutral.items():
        if name in given and given[name] not in values:
            valid = " or ".join(str(value) for value in values)
            message = f"{name}={given[name]!r}: a beam search draws nothing; valid: {valid}, or leave it out"
            raise RequestError(Fault.parameter, message, name)
    stop: Literal["heuristic", "first", "never"] = "heuristic"
    if early_stopping:
        stop = "never" if early_stopping == "never" else "first"
    return Beams(width=width, length_penalty=length_penalty, stop=stop)


def refuse_beam_fields(length_penalty: float | None, early_stopping: bool | str | None, needed: str) -> None:
    for name, value, off in (("length_penalty", length_penalty, 1.0), ("early_stopping", early_stopping, False)):
        if value is not None and value != off:
            raise RequestError(Fault.parameter, f"{name}={value!r} needs {needed}", name)


# Fields that ask for a draw, and the values that a beam search lets pass.
DRAWING: dict[str, Sequence[object]] = {
    "temperature": (0, 1),
    "top_k": (0, 1),
    "top_p": (1,),
    "min_p": (0,),
    "top_p_decay": (1,),
    **{
        name: (SamplerFields.model_fields[name].default,)
        for name in (
            "top_a",
            "tfs",
            "typical_p",
            "epsilon_cutoff",
            "eta_cutoff",
            "nsigma",
            "dynatemp_max",
            "smoothing_factor",
            "skew",
            "xtc_probability",
            "mirostat_mode",
        )
    },
}
