"""What an answer must look like, in llguidance's terms; everything that a client sent is bounded before it is compiled."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, StructTag, grammar_from

from maga_transformer.request import Fault, RequestError, quote

MAX_BYTES = 64 << 10  # of a grammar's text: compiled in tens of milliseconds
MAX_DEPTH = 64  # nested schemas, brackets of a grammar
MAX_PROPERTIES = 512  # of one schema, all objects together: optional ones cost their square
MAX_CHOICES = 1024
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_MAX_COUNT = 1 << 16


@dataclass(frozen=True)
class Grammar:
    """`text` is what llguidance compiles. `field` is the request's field that asked for it, for messages."""

    text: str
    field: str
    after: str = ""  # nothing is constrained before the answer has come to this: the end of what a model thinks
    schemas: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)  # in it, by the request's fields


def json_object(field: str) -> Grammar:
    return json_schema({"type": "object"}, field)


def json_schema(schema: Any, field: str) -> Grammar:
    """`schema`: an object, true, or its JSON text. Keywords that cannot be enforced are refused when it is compiled."""
    schema = _parsed(schema, field, "must be a JSON schema: this is not JSON")
    if not isinstance(schema, (dict, bool)):
        raise _bad(field, schema, "must be a JSON schema: an object")
    check_schema(schema, field)
    text = _dump(schema, field)
    return Grammar(_built(field, lambda: LLMatcher.grammar_from_json_schema(text)), field, schemas={field: schema})


def regex(pattern: Any, field: str) -> Grammar:
    if not isinstance(pattern, str) or not pattern:
        raise _bad(field, pattern, "must be a regular expression that is not empty")
    _check_size(pattern, field)
    return Grammar(LLMatcher.grammar_from_regex(pattern), field)


def choice(options: Any, field: str) -> Grammar:
    if not isinstance(options, list) or not options or any(not isinstance(option, str) or not option for option in options):
        raise _bad(field, options, "must be a list of texts, at least one, none of them empty")
    if len(options) > MAX_CHOICES:
        raise _bad(field, options, f"at most {MAX_CHOICES} choices, not {len(options)}")
    lark = "start: " + " | ".join(json.dumps(option, ensure_ascii=False) for option in options)
    _check_size(lark, field)
    return Grammar(LLMatcher.grammar_from_lark(lark), field)


def context_free(text: Any, field: str) -> Grammar:
    """Lark as llguidance writes it, or llama.cpp's GBNF."""
    if not isinstance(text, str) or not text.strip():
        raise _bad(field, text, "must be a grammar, in Lark or GBNF")
    _check_size(text, field)
    depth = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if depth > MAX_DEPTH:
            raise _bad(field, text, f"brackets are nested deeper than {MAX_DEPTH}")
    return Grammar(_built(field, lambda: grammar_from("grammar", text)), field)


def lark(text: str, field: str, schemas: Mapping[str, Any]) -> Grammar:
    """A grammar of our own making."""
    return Grammar(LLMatcher.grammar_from_lark(text), field, schemas=schemas)


def structural_tag(value: Any, field: str) -> Grammar:
    """vLLM's: free text in which each trigger begins a part that follows a schema."""
    value = _parsed(value, field, "must be JSON")
    structures, triggers = (value.get("structures"), value.get("triggers")) if isinstance(value, dict) else (None, None)
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures or not triggers:
        raise _bad(field, value, 'must be {"structures": [{"begin", "schema", "end"}], "triggers": [...]}')
    tags, schemas = [], {}
    for index, structure in enumerate(structures[:MAX_CHOICES]):
        place = f"{field}.structures[{index}]"
        if not isinstance(structure, dict) or not isinstance(structure.get("begin"), str):
            raise _bad(place, structure, "must be an object with begin, schema and end")
        begin, schema, end = structure["begin"], structure.get("schema") or {}, structure.get("end") or ""
        trigger = next((text for text in triggers if isinstance(text, str) and text and begin.startswith(text)), None)
        if trigger is None or not isinstance(end, str):
            raise _bad(place, structure, "its begin starts with none of the triggers, or its end is no text")
        check_schema(schema, place)
        schemas[f"{place}.schema"] = schema
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=end))
    return Grammar(_built(field, lambda: StructTag.to_grammar(tags, assume_special=False)), field, schemas=schemas)


def from_response_format(value: Any, field: str = "response_format") -> Grammar | None:
    """OpenAI's, with `schema` beside `type` as llama.cpp takes it. None: plain text."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text" or value == {}:
        return None
    if kind == "json_object":
        return json_schema(value["schema"], f"{field}.schema") if value.get("schema") is not None else json_object(field)
    if kind == "json_schema":
        named = value.get("json_schema")
        schema = named.get("schema") if isinstance(named, dict) else value.get("schema")
        if schema is None:
            raise _bad(f"{field}.json_schema" if isinstance(named, dict) else field, value, "must hold a schema")
        return json_schema(schema, f"{field}.json_schema.schema" if isinstance(named, dict) else f"{field}.schema")
    if kind == "structural_tag":
        return structural_tag({key: part for key, part in value.items() if key != "type"}, field)
    raise _bad(field, value, "its type must be text, json_object or json_schema")


_STRUCTURED = {
    "json": json_schema,
    "regex": regex,
    "choice": choice,
    "grammar": context_free,
    "structural_tag": structural_tag,
}


def from_structured_outputs(value: Any) -> Grammar | None:
    """vLLM's `structured_outputs`: one of json, json_object, regex, choice, grammar, structural_tag."""
    field = "structured_outputs"
    if not isinstance(value, dict):
        raise _bad(field, value, "must be an object")
    given = {name: part for name, part in value.items() if part is not None and part is not False}
    unknown = sorted(set(given) - {*_STRUCTURED, "json_object"})
    if unknown:
        raise RequestError(Fault.unsupported, f"{field}.{unknown[0]} is not supported; leave it out", f"{field}.{unknown[0]}")
    if len(given) > 1:
        raise _bad(field, sorted(given), "only one of them can hold")
    for name, part in given.items():
        return json_object(f"{field}.{name}") if name == "json_object" else _STRUCTURED[name](part, f"{field}.{name}")
    return None


def from_fields(fields: Mapping[str, Any]) -> Grammar | None:
    """Of a request's fields by name, OpenAI's and vLLM's; neutral values ask for nothing. Several at once contradict each other."""
    found = []
    for name, value in fields.items():
        if value is None or value in ("", {}, []):
            continue
        if name == "response_format":
            grammar = from_response_format(value)
        elif name == "structured_outputs":
            grammar = from_structured_outputs(value)
        else:
            grammar = _STRUCTURED[FIELDS[name]](value, name)
        if grammar is not None:
            found.append(grammar)
    if len(found) > 1:
        raise RequestError(
            Fault.parameter, f"{' and '.join(grammar.field for grammar in found)}: only one of them can hold", found[1].field
        )
    return found[0] if found else None


# Fields that stand for one member of structured_outputs: vLLM's older ones, llama.cpp's, RTP-LLM's.
FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
    "json_schema": "json",
    "grammar": "grammar",
    "grammar_string": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
}


def check_schema(schema: Any, field: str) -> None:
    properties = 0
    for place, depth, part in _parts(schema, field):
        if depth > MAX_DEPTH:
            raise _bad(place, part, f"nested deeper than {MAX_DEPTH}")
        if not isinstance(part, dict):
            continue
        inner = part.get("properties")
        properties += len(inner) if isinstance(inner, dict) else 0
        if properties > MAX_PROPERTIES:
            raise _bad(place, part, f"more than {MAX_PROPERTIES} properties")
        for name in _COUNTS:
            if isinstance(part.get(name), int) and part[name] > _MAX_COUNT:
                raise _bad(f"{place}.{name}", part[name], f"at most {_MAX_COUNT}")


# How llguidance speaks of a keyword and its value.
_BLAMED = {"type": "Invalid type: {}\n", "$ref": "{}'", "pattern": "    {}\n", "format": "Unknown format: {}\n"}


def blamed(grammar: Grammar, error: str) -> str:
    """The place in the request that a message of llguidance is about, as far as can be told, and its value."""
    for field, schema in grammar.schemas.items():
        for place, _, part in _parts(schema, field):
            for key, value in part.items() if isinstance(part, dict) else ():
                said = _BLAMED[key].format(value.lstrip("#")) if key in _BLAMED and isinstance(value, str) else f'["{key}"'
                if said in f"{error}\n":
                    return f"{place}.{key}={quote(value)}"
    return next(iter(grammar.schemas), grammar.field) if len(grammar.schemas) == 1 else grammar.field


def _parts(value: Any, place: str) -> Iterator[tuple[str, int, Any]]:
    """Every part of a JSON value with its path and depth, without recursion."""
    left = [(place, 0, value)]
    while left:
        at, depth, part = left.pop()
        yield at, depth, part
        inner = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
        left += [(f"{at}.{key}"[:256], depth + 1, each) for key, each in inner]


def _parsed(value: Any, field: str, valid: str) -> Any:
    """What a text holds; anything else as it is."""
    if not isinstance(value, str):
        return value
    _check_size(value, field)
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise _bad(field, value, valid) from None


def _dump(schema: Any, field: str) -> str:
    text = json.dumps(schema, ensure_ascii=False)
    _check_size(text, field)
    return text


def _check_size(text: str, field: str) -> None:
    size = len(text.encode(errors="replace"))
    if size > MAX_BYTES:
        raise RequestError(Fault.parameter, f"{field} has {size} bytes; at most {MAX_BYTES}", field)


def _built(field: str, build: Any) -> str:
    """llguidance's own converters raise what they like."""
    try:
        return str(build())
    except Exception as error:
        raise RequestError(Fault.parameter, f"{field}: {str(error)[:256]}", field) from None


def _bad(field: str, value: Any, valid: str) -> RequestError:
    return RequestError(Fault.parameter, f"{field}={quote(value)}: {valid}", field)
