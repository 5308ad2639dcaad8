"""The grammar of an answer that must be tool calls, in the model's own markup."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from maga_transformer.chat.tool_formats import ToolFormat
from maga_transformer.request import Fault, RequestError
from maga_transformer.structured.grammar import Grammar, check_schema, lark


def tool_grammar(form: ToolFormat, schemas: Mapping[str, Mapping[str, Any]], *, several: bool, field: str) -> Grammar:
    """At least one call of one of the tools; `several`: or more."""
    if form.read is not None:
        raise RequestError(
            Fault.unsupported,
            f"{field}: this model's way to write tool calls ({form.name}) cannot be enforced; valid: auto, none",
            field,
        )
    places = {f"tools[{index}].function.parameters": schema for index, schema in enumerate(schemas.values())}
    for place, schema in places.items():
        check_schema(schema, place)
    calls = [f"call{index}: {_call(form, name, schema)}" for index, (name, schema) in enumerate(schemas.items())]
    one = " | ".join(f"call{index}" for index in range(len(calls)))
    before, after = form.each
    more = f" ({_literal(form.between)} one)*" if several else ""
    rules = [
        f"start: {_literal(form.around[0])} one{more} {_literal(form.around[1])}",
        f"one: {_literal(before)} ({one}) {_literal(after)}",
        *calls,
    ]
    return lark("\n".join(rules), field, places)


def _call(form: ToolFormat, name: str, schema: Mapping[str, Any]) -> str:
    parameters: dict[str, Any] = {"type": "object", **schema}
    if "properties" in parameters:  # functions take no arguments that they do not name
        parameters.setdefault("additionalProperties", False)
    if form.named is not None:
        return f"{_literal(form.named[0] + name + form.named[1])} {_json(parameters)}"
    whole: dict[str, Any] = {
        "type": "object",
        "properties": {"name": {"const": name}, form.arguments_key: parameters},
        "required": ["name", form.arguments_key],
        "additionalProperties": False,
    }
    for key in ("$defs", "definitions"):  # a $ref begins at the root
        if key in parameters:
            whole[key] = parameters.pop(key)
    return _json(whole)


def _json(schema: Mapping[str, Any]) -> str:
    """Keywords of a tool's schema that cannot be enforced are left to the tool."""
    return "%json " + json.dumps({"x-guidance": {"lenient": True, "whitespace_flexible": False}, **schema}, ensure_ascii=False)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else '""'
