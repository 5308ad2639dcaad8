"""What each route's body may hold, as /openapi.json says it: the models that check the bodies, and what those leave to the code
behind them."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from maga_transformer import generate_config, samplers
from maga_transformer.generate_config import GenerateConfig
from maga_transformer.server import (
    admin,
    anthropic,
    anthropic_request,
    embeddings,
    kobold,
    kobold_request,
    openai,
    raw,
    responses,
    status,
)
from maga_transformer.server.messages import ROLES
from maga_transformer.server.responses_request import NEEDS_STORE, ResponsesRequest
from maga_transformer.server.schemas import ChatRequest, CompletionRequest, OpenAIRequest

Schema = dict[str, Any]
_JSON, _EVENTS = "application/json", "text/event-stream"
_JSON_OR_EVENTS = (_JSON, _EVENTS)
Neutral = Mapping[str, Collection[object]]  # fields that are refused unless they have one of these values


@dataclass(frozen=True)
class Body:
    model: type[BaseModel]
    required: Collection[str] = ()
    answers: Collection[str] = (_JSON,)
    fields: Mapping[str, Schema] = field(default_factory=dict)  # where the model says less than the code behind it wants
    refused: Neutral = field(default_factory=dict)
    free: Collection[str] = ()  # taken whatever they hold
    aliases: Mapping[str, str] = field(default_factory=dict)
    closed: bool = False  # other fields are refused
    optional: bool = False  # an empty body is one without fields


_TEXT: Schema = {"type": "string"}
_SOME_TEXT: Schema = {"type": "string", "minLength": 1}
_OBJECT: Schema = {"type": "object"}
_ID: Schema = {"type": "integer", "minimum": 0}
_IDS: Schema = {"type": "array", "items": _ID, "minItems": 1}
_SOME_TEXTS: Schema = {"type": "array", "items": _SOME_TEXT, "minItems": 1}
_TEXTS_OR_IDS: Schema = {"anyOf": [_SOME_TEXT, _SOME_TEXTS, _IDS, {"type": "array", "items": _IDS, "minItems": 1}]}
_TEXTS: Schema = {
    "anyOf": [_SOME_TEXT, _SOME_TEXTS, {"type": "array", "items": {"type": "object", "required": ["text"]}, "minItems": 1}]
}
_TEXT_OR_PARTS: Schema = {"anyOf": [_TEXT, {"type": "array", "items": _OBJECT}]}


def _messages(*roles: str) -> Schema:
    """Text, or parts of text; an assistant's may have none. Where tools answer as a role, calls are a field of a turn."""
    said = {"role": {"enum": [role for role in roles if role != "assistant"]}, "content": _TEXT_OR_PARTS}
    answered = {"role": {"const": "assistant"}, "content": {"anyOf": [*_TEXT_OR_PARTS["anyOf"], {"type": "null"}]}}
    calls = {"tool_calls": {"anyOf": [{"type": "array", "items": _OBJECT}, {"type": "null"}]}} if "tool" in roles else {}
    return {
        "type": "array",
        "minItems": 1,
        "items": {
            "anyOf": [
                {"type": "object", "required": ["role", "content"], "properties": said | calls},
                {"type": "object", "required": ["role"], "properties": answered | calls},
            ]
        },
    }


_OBJECTS: Schema = {"type": "array", "items": _OBJECT}
_TEXT_OR_OBJECT: Schema = {"anyOf": [_TEXT, _OBJECT]}
_GRAMMARS: dict[str, Schema] = {
    "response_format": _OBJECT,
    "structured_outputs": _OBJECT,
    "guided_json": {"anyOf": [_TEXT, _OBJECT, {"type": "boolean"}]},
    "json_schema": {"anyOf": [_TEXT, _OBJECT, {"type": "boolean"}]},
    "guided_regex": _TEXT,
    "guided_choice": {"type": "array", "items": _SOME_TEXT, "maxItems": 1024},
    "guided_grammar": _TEXT,
    "grammar": _TEXT,
    "grammar_string": _TEXT,
    "regex": _TEXT,
    "ebnf": _TEXT,
    "structural_tag": _TEXT_OR_OBJECT,
}
_TOP_K: Schema = {"type": "integer", "minimum": -1}
_STOP: Schema = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": generate_config.MAX_STOP_STRINGS}]}
# Whose models take more spellings than their types say.
_SAMPLERS: dict[str, Schema] = {
    "top_k": _TOP_K,
    "dry_range": {"type": "integer", "minimum": -1},
    "dry_sequence_breakers": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]},
    "sampler_priority": {"type": "array", "items": {"anyOf": [{"enum": list(samplers.STAGES)}, _ID]}},
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,18}$"},
        "additionalProperties": {"type": "number", "minimum": -1e9, "maximum": 1e9},
    },
}
_OPENAI: dict[str, Schema] = {
    **_SAMPLERS,
    **_GRAMMARS,
    "stop": _STOP,
    "truncate_prompt_tokens": {"type": "integer", "minimum": -1},
    "tools": _OBJECTS,
    "tool_choice": _TEXT_OR_OBJECT,
    "messages": _messages(*ROLES),
    "prompt": _TEXTS_OR_IDS,
    "input": {"anyOf": [_TEXT, _OBJECTS]},
}


def _openai(kind: type[OpenAIRequest], *required: str) -> Body:
    return Body(kind, required, _JSON_OR_EVENTS, _OPENAI, kind.refused, kind.no_effect, samplers.ALIASES)


_CHAT = _openai(ChatRequest, "messages")
_RESPONSES = _openai(ResponsesRequest)
_RESPONSES = dataclasses.replace(_RESPONSES, refused={**_RESPONSES.refused, **NEEDS_STORE})
_ANTHROPIC = Body(
    anthropic_request.MessagesRequest,
    required=("messages", "max_tokens"),
    answers=_JSON_OR_EVENTS,
    fields={"messages": _messages("user", "assistant", "system"), "system": _TEXT_OR_PARTS, "top_k": _TOP_K, "tools": _OBJECTS},
)
_KOBOLD = Body(
    kobold_request.KoboldRequest,
    fields={
        **_SAMPLERS,
        "prompt": _SOME_TEXT,
        "sampler_seed": {"type": "integer", "minimum": -1},
    },
    refused=kobold_request.UNSUPPORTED,
    free=kobold_request.NO_EFFECT,
    aliases=kobold_request.OWN_NAMES,
)
_ID_OR_IDS: Schema = {"anyOf": [_ID, {"type": "array", "items": _ID, "maxItems": 1024}]}
_RAW_FIELDS: dict[str, Schema] = {
    **_SAMPLERS,
    **_GRAMMARS,
    **dict.fromkeys(("top_p_reset_ids", "eos_token_id", "select_tokens_id"), _ID_OR_IDS),
}
_EMBEDDINGS = Body(embeddings.EmbeddingRequest, fields={"input": _TEXTS_OR_IDS, "prompt": _TEXTS_OR_IDS})
_RERANK = Body(embeddings.RerankRequest, required=("query", "documents"), fields={"documents": _TEXTS, "query": _SOME_TEXT})

BODIES: dict[Callable[[Request], Awaitable[Response]], Body] = {
    openai.chat_completions: _CHAT,
    openai.chat_render: dataclasses.replace(_CHAT, answers=(_JSON,)),
    openai.completions: _openai(CompletionRequest, "prompt"),
    responses.responses: _RESPONSES,
    responses.input_tokens: dataclasses.replace(_RESPONSES, answers=(_JSON,)),
    raw.raw: Body(
        GenerateConfig,
        answers=_JSON_OR_EVENTS,
        fields={
            **_RAW_FIELDS,
            "prompt": {"anyOf": [_SOME_TEXT, _SOME_TEXTS, _messages(*ROLES)]},
            "text": {"anyOf": [_SOME_TEXT, _SOME_TEXTS, _messages(*ROLES)]},
            "prompt_batch": {"anyOf": [_SOME_TEXTS, _messages(*ROLES)]},
            "messages": _messages(*ROLES),
            "generate_config": _OBJECT,
            "generation_config": _OBJECT,
            "private_request": {"type": "boolean"},
            "master_info": {},
        },
        refused={**generate_config.UNSUPPORTED, "images": ([],), "urls": ([],), "functions": ([],)},
        free=generate_config.NO_EFFECT,
        aliases=generate_config.ALIASES,
        closed=True,
    ),
    anthropic.messages: _ANTHROPIC,
    anthropic.count_tokens: Body(_ANTHROPIC.model, required=("messages",), fields=_ANTHROPIC.fields),
    kobold.generate: _KOBOLD,
    kobold.generate_stream: dataclasses.replace(_KOBOLD, answers=(_EVENTS,)),
    kobold.check: Body(kobold_request.GenkeyRequest, optional=True),
    kobold.abort: Body(kobold_request.GenkeyRequest, optional=True),
    kobold.tokencount: Body(kobold_request.TokenCountRequest),
    status.tokenizer_encode: Body(status.EncodeRequest, required=("prompt",)),
    status.tokenize: Body(status.TokenizeRequest, fields={"messages": _messages(*ROLES), "tools": _OBJECTS}),
    status.detokenize: Body(status.DetokenizeRequest, required=("tokens",), fields={"tokens": {"type": "array", "items": _ID}}),
    admin.update: Body(admin.UpdateRequest),
    admin.set_log_level: Body(admin.LogLevelRequest),
    embeddings.embeddings: _EMBEDDINGS,
    **dict.fromkeys(embeddings.OF_KINDS.values(), _EMBEDDINGS),
    embeddings.similarity: Body(
        embeddings.SimilarityRequest, required=("left", "right"), fields={"left": _TEXTS_OR_IDS, "right": _TEXTS_OR_IDS}
    ),
    embeddings.reranker: _RERANK,
    embeddings.rerank: _RERANK,
    embeddings.score: Body(embeddings.ScoreRequest, required=("text_1", "text_2"), fields={"text_1": _TEXTS, "text_2": _TEXTS}),
}
