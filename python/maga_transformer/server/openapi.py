"""The OpenAPI document of what is served here, out of the route table and the models that check the bodies."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic.json_schema import models_json_schema

from maga_transformer import __version__
from maga_transformer.server.auth import is_open
from maga_transformer.server.errors import CODES, SHAPES, writer
from maga_transformer.server.health import ready
from maga_transformer.server.openapi_bodies import BODIES, Body, Schema

if TYPE_CHECKING:
    from maga_transformer.server.routes import Route

_REF = "#/components/schemas/{model}"
_OF_A_BODY = (400, 404, 408, 413, 415, 429, 500, 503, 504)
_OF_A_PATH = (404, 500)
_NOT_JSON = {"/metrics": "text/plain", "/page/{name}": "*/*"}
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def document(routes: Iterable[Route], *, keys: bool) -> dict[str, Any]:
    """`keys`: whether any are wanted."""
    models = sorted({body.model for body in BODIES.values()}, key=lambda model: model.__name__)
    _, shared = models_json_schema([(model, "validation") for model in models], ref_template=_REF)
    schemas: dict[str, Schema] = shared["$defs"]
    paths: dict[str, Any] = {}
    for route in routes:
        path = re.sub(r"\{(\w+):path\}", r"{\1}", route.path)
        for method in route.methods:
            paths.setdefault(path, {})[method.lower()] = _operation(route, method, path, schemas, keys)
    bodies = {body.model.__name__ for body in BODIES.values()}
    kept = {name: schema for name, schema in schemas.items() if name not in bodies}
    components: dict[str, Any] = {"schemas": SHAPES | kept} | ({"securitySchemes": _KEYS} if keys else {})
    return {
        "openapi": "3.1.0",
        "info": {"title": "maga_transformer", "version": __version__},
        "paths": paths,
        "components": components,
    }


def document_text(routes: Iterable[Route], *, keys: bool) -> bytes:
    return json.dumps(document(routes, keys=keys)).encode()  # seeds have 64 bits, of which orjson takes 2^64 - 1 and not 2^64


def _operation(route: Route, method: str, path: str, schemas: Mapping[str, Schema], keys: bool) -> dict[str, Any]:
    body = BODIES.get(route.endpoint) if method == "POST" else None
    failures = [*(_OF_A_BODY if body else _OF_A_PATH), *([401, 403] if keys and not is_open(method, path) else [])]
    words = {code.status: code.code for code in CODES.values()}
    responses = {
        str(status): {
            "description": str(words.get(status, "error")),
            "content": {"application/json": {"schema": {"$ref": _REF.format(model=writer(path).__name__)}}},
        }
        for status in sorted(failures)
    }
    answers = body.answers if body else (_NOT_JSON.get(path, "application/json"),)
    responses["200"] = {"description": "OK", "content": {kind: {} for kind in answers}}
    if route.endpoint is ready:
        responses["503"] = {
            "description": "draining, stalled, or the device is lost",
            "content": {"application/json": {"schema": {"type": "string"}}},
        }
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}_{re.sub(r'[^A-Za-z0-9]+', '_', path).strip('_') or 'root'}",
        "tags": [route.group],
        "summary": (inspect.getdoc(route.endpoint) or "").replace("\n", " "),
        "responses": dict(sorted(responses.items())),
    }
    names = re.findall(r"\{(\w+)\}", path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}} for name in names
        ]
    if body:
        content = {"application/json": {"schema": body_schema(body, schemas[body.model.__name__])}}
        operation["requestBody"] = {"required": not body.optional, "content": content}
    if keys and not is_open(method, path):
        operation["security"] = [{name: []} for name in _KEYS]
    return operation


def body_schema(body: Body, model: Schema) -> Schema:
    """`model`: as pydantic describes it. Null is as good as leaving a field out, everywhere."""
    properties = {name: body.fields.get(name, schema) for name, schema in model.get("properties", {}).items()}
    properties |= {name: schema for name, schema in body.fields.items() if name not in properties and body.closed}
    properties |= {name: {"enum": [*neutral]} for name, neutral in body.refused.items()}
    properties |= {name: {} for name in body.free}
    properties |= {alias: properties[name] for alias, name in body.aliases.items() if name in properties}
    required = sorted({*body.required, *model.get("required", ())})
    schema: Schema = {
        "type": "object",
        "title": body.model.__name__,
        "properties": {name: properties[name] if name in required else _or_null(properties[name]) for name in sorted(properties)},
    }
    if required:
        schema["required"] = required
    if body.closed:
        schema["additionalProperties"] = False
    return schema


def _or_null(schema: Schema) -> Schema:
    if not schema:
        return schema
    if "enum" in schema:
        return {"enum": [*schema["enum"], None]} if None not in schema["enum"] else schema
    kinds = schema.get("anyOf", [{name: part for name, part in schema.items() if name not in ("title", "default")}])
    about: Schema = {name: schema[name] for name in ("title", "default") if name in schema}
    return {"anyOf": [*kinds, *([] if {"type": "null"} in kinds else [{"type": "null"}])], **about}
