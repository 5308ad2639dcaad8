"""docs/api.md: the routes and, for each field of their bodies, what is done with it; out of the code that serves them.

`python tests/api_docs.py` writes it anew; tests/server/test_api_docs.py fails where it is not true."""

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maga_transformer import generate_config
from maga_transformer.generate_config import GenerateConfig
from maga_transformer.request import Fault
from maga_transformer.server import anthropic_request, embeddings, kobold_request, raw, schemas
from maga_transformer.server.auth import ADMIN_PATHS, is_open
from maga_transformer.server.errors import CODES, RETRY_AFTER_SECONDS
from maga_transformer.server.responses_request import ITEMS, NEEDS_STORE, ResponsesRequest
from maga_transformer.server.routes import routes
from pydantic import BaseModel

FILE = Path(__file__).parents[1] / "docs" / "api.md"
HEAD = """# HTTP API

Written by `tests/api_docs.py` from the code that serves it. `null` is as good as leaving a field out, everywhere.

- **honoured**: the value is used; one of another type or range is answered with 400 and a message that names the field.
- **refused unless neutral**: known, but not there: a value that asks for something is answered with 400 and the field's name.
- **no effect**: a label for the caller's own use, or a choice between things that are the same here.
- `max_tokens` and `max_completion_tokens` are cut to what the context leaves; -1 asks for as many as fit, as does leaving them out,
  but of `/v1/completions`, where OpenAI's default is 16.
- `model`: a name that is served; left out or empty it is the first of them.
- Unknown fields: refused on `POST /`; on the other routes ignored, and named in the header `X-Maga-Ignored` (`MAGA_STRICT=1`:
  refused on OpenAI's). Clients send dozens of fields of other servers.
"""
RESPONSES = (
    f"Items of `input`: {', '.join(f'`{kind}`' for kind in ITEMS)}. Tools that are no functions are ignored and named in "
    "`X-Maga-Ignored`. Nothing is kept between requests: refused where they ask for something, "
    f"{', '.join(f'`{name}`' for name in NEEDS_STORE)}. Thoughts are items of type `reasoning`, in full (`content`)."
)


def document() -> str:
    parts = [HEAD, _routes(), _errors()]
    aliases = [f"{alias}` for `{name}" for alias, name in generate_config.ALIASES.items()]
    parts += [
        _openai("POST /v1/chat/completions", schemas.ChatRequest),
        _openai("POST /v1/completions", schemas.CompletionRequest),
        _openai("POST /v1/responses, /v1/responses/input_tokens", ResponsesRequest, RESPONSES),
        _fields("POST /v1/messages", anthropic_request.MessagesRequest, {}, ()),
        _fields(
            "POST /api/v1/generate, /api/extra/generate/stream",
            kobold_request.KoboldRequest,
            kobold_request.UNSUPPORTED,
            kobold_request.NO_EFFECT,
        ),
        _fields(
            "POST /: generate_config, or at the top level",
            GenerateConfig,
            generate_config.UNSUPPORTED,
            generate_config.NO_EFFECT,
            f"Beside it: {_names(raw.ENVELOPE)}. Other names: {_names(aliases)}.",
        ),
        _fields("POST /v1/embeddings", embeddings.EmbeddingRequest, {}, ()),
        _fields("POST /v1/rerank", embeddings.RerankRequest, {}, ()),
        _fields("POST /v1/score", embeddings.ScoreRequest, {}, ()),
    ]
    return "\n".join(parts)


def _routes() -> str:
    lines = ["## Routes", "", "| | method | path | key | |", "|---|---|---|---|---|"]
    for route in routes(generates=True):
        key = "none" if is_open(route.methods[0], route.path) else "administrator's" if route.path in ADMIN_PATHS else "client's"
        about = (inspect.getdoc(route.endpoint) or "").split("\n")[0]
        path = route.path.replace("{name:path}", "NAME")
        lines.append(f"| {route.group} | {', '.join(route.methods)} | `{path}` | {key} | {about} |")
    return "\n".join(
        [
            *lines,
            "",
            "Keys are wanted once `--api-key` (or `--admin-api-key`) is set; any client's key may be the administrator's.",
            "",
        ]
    )


def _errors() -> str:
    lines = [
        "## Errors",
        "",
        "OpenAI's routes answer `{error: {message, type, param, code}}`, Anthropic's `{type: error, error: {type, message}}`,",
        "Kobold's `{detail: {msg, type}}`, the raw ones `{error_code, message}`. In a stream the same body is the last event.",
        "",
        "| status | code | error_code | Retry-After |",
        "|---|---|---|---|",
    ]
    for fault in Fault:
        code = CODES[fault]
        lines.append(f"| {code.status} | {code.code} | {code.raw} | {RETRY_AFTER_SECONDS.get(fault, '')} |")
    return "\n".join([*lines, ""])


def _fields(title: str, model: type[BaseModel], refused: Mapping[str, Sequence[Any]], no_effect: Any, more: str = "") -> str:
    lines = [f"## {title}", "", *([more, ""] if more else []), "| honoured | values | default |", "|---|---|---|"]
    schema = model.model_json_schema(by_alias=True)
    for name, field in schema["properties"].items():
        if name not in refused:
            lines.append(f"| `{name}` | {_values(field, schema.get('$defs', {}))} | {_default(field)} |")
    lines.append("")
    if refused:
        neutral = [f"`{name}`" + (f" ({', '.join(map(_shown, values))})" if values else "") for name, values in refused.items()]
        lines += [f"Refused unless neutral: {', '.join(neutral)}.", ""]
    if no_effect:
        lines += [f"No effect: {_names(no_effect)}.", ""]
    return "\n".join(lines)


def _openai(title: str, model: type[schemas.OpenAIRequest], more: str = "") -> str:
    return _fields(title, model, model.refused, model.no_effect, more)


def _names(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _shown(value: Any) -> str:
    return f"`{json.dumps(value)}`"


def _default(field: Mapping[str, Any]) -> str:
    return _shown(field["default"]) if field.get("default") is not None else ""


def _values(field: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    kinds = [kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null"]
    return " or ".join(_kind(kind, definitions) for kind in kinds).replace("|", "\\|")


def _kind(kind: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    if "$ref" in kind:
        members = definitions[kind["$ref"].rsplit("/", 1)[1]].get("properties", {})
        return "object of " + ", ".join(f"`{name}`" for name in members)
    if "enum" in kind:
        return ", ".join(_shown(value) for value in kind["enum"])
    bounds = [
        f"{sign} {kind[key]:g}"
        for key, sign in (("minimum", "from"), ("exclusiveMinimum", "above"), ("maximum", "to"), ("exclusiveMaximum", "below"))
        if key in kind
    ]
    name = kind.get("type", "as its API has it")
    if name == "array":
        name = f"list of {_values(kind.get('items', {}), definitions)}"
    return " ".join([name, *bounds])


if __name__ == "__main__":
    FILE.write_text(document(), encoding="utf-8")
