"""KoboldAI's request body, with KoboldCpp's samplers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from maga_transformer.generate_config import MAX_SEQUENCES, Finite, LogitBias, StopStrings, TopK, refuse_unless_neutral, validate
from maga_transformer.request import Fault, RequestError, Sampling
from maga_transformer.samplers import Positive, SamplerFields
from maga_transformer.structured.grammar import Grammar, context_free

# Known fields that cannot be honoured yet -> values that ask for nothing.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "images": ([],),
    "negative_prompt": ("",),
    "banned_tokens": ([],),
}
# Switches of the page.
NO_EFFECT = frozenset(
    [
        "quiet",
        "can_abort",
        "streaming",
        "api_server",
        "use_memory",
        "use_story",
        "use_authors_note",
        "use_world_info",
        "singleline",
        "gui_settings",
        "frmttriminc",
        "frmtrmblln",
        "frmtrmspch",
        "render_special",
        "grammar_retain_state",
        "trim_stop",
        "replace_instruct_placeholders",
    ]
)
# Of samplers that are spelt differently elsewhere.
OWN_NAMES = {
    "eps_cutoff": "epsilon_cutoff",
    "mirostat": "mirostat_mode",
    "typical": "typical_p",
    "dry_penalty_last_n": "dry_range",
}


def _no_seed(value: object) -> object:
    """-1, and the -1 and 0 of some pages, ask for a random one."""
    return None if value in (-1, 0) and value is not False else value


class GenkeyRequest(BaseModel):
    """Names a running request."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    genkey: str = ""


class TokenCountRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    prompt: str


class KoboldRequest(SamplerFields):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    prompt: str
    memory: str = ""  # before the prompt
    genkey: str = Field("", max_length=256)
    n: int = Field(1, ge=1, le=MAX_SEQUENCES)
    max_context_length: int | None = Field(None, ge=1)
    max_length: int = Field(100, ge=1)
    temperature: Finite = Field(1.0, ge=0, le=1e6)
    top_k: TopK = 0
    top_p: Finite = Field(1.0, ge=0, le=1)
    min_p: Finite = Field(0.0, ge=0, le=1)
    rep_pen: Finite = Field(1.0, gt=0, le=1e6)
    presence_penalty: Finite = Field(0.0, ge=-2, le=2)
    dynatemp_range: Positive = 0.0  # on either side of the temperature
    sampler_seed: Annotated[Annotated[int, Field(ge=0, lt=1 << 64)] | None, BeforeValidator(_no_seed)] = None
    stop_sequence: StopStrings = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    bypass_eos: bool = False  # the text goes on behind an end
    use_default_badwordsids: bool = False  # no end is drawn
    logit_bias: LogitBias = Field(default_factory=dict)
    grammar: str = ""

    def sampling(self, eos_ids: Iterable[int]) -> Sampling:
        return Sampling(
            max_new_tokens=self.max_length,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.rep_pen,
            presence_penalty=self.presence_penalty,
            rare=self._rare(sorted(eos_ids) if self.use_default_badwordsids else []),
            seed=self.sampler_seed,
            stop_strings=self.stop_sequence,
            keep_stop=self.include_stop_str_in_output,
            ignore_eos=self.bypass_eos,
            logit_bias=self.logit_bias,
        )

    def _rare(self, banned: list[int]) -> dict[str, Any]:
        changes: dict[str, Any] = {"custom_token_bans": [*self.custom_token_bans, *banned]}
        if self.dynatemp_range:
            changes["dynatemp_min"] = max(0.0, self.temperature - self.dynatemp_range)
            changes["dynatemp_max"] = self.temperature + self.dynatemp_range
        return self.model_copy(update=changes).rare()

    def grammar_of(self) -> Grammar | None:
        return context_free(self.grammar, "grammar") if self.grammar.strip() else None


def present(body: Mapping[str, Any]) -> dict[str, Any]:
    """Null is absent."""
    return {name: value for name, value in body.items() if value is not None}


def parse(body: Mapping[str, Any]) -> tuple[KoboldRequest, list[str]]:
    """The request, and the names of the fields that were ignored."""
    fields: dict[str, Any] = {}
    for name, value in ((OWN_NAMES.get(name, name), value) for name, value in body.items()):
        if value is None or name in NO_EFFECT:
            continue
        if name in UNSUPPORTED:
            refuse_unless_neutral(name, value, UNSUPPORTED[name])
            continue
        fields[name] = value
    if not fields.get("prompt"):
        raise RequestError(Fault.empty_prompt if "prompt" in fields else Fault.no_prompt, "prompt is missing or empty", "prompt")
    request = validate(KoboldRequest, fields)
    return request, [name for name in request.model_extra or {} if name.isidentifier() and name.isascii()][:32]
