"""Chat templates: Jinja in a sandbox, with the settings, filters and functions that transformers gives them."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]


class ChatTemplate:
    """One compiled template. `where` names it in messages: a file, or a key of one."""

    def __init__(self, source: str, where: str) -> None:
        self.source = source
        self.where = where
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"{where}: line {error.lineno} of the chat template: {error.message}") from None
        except RecursionError:
            raise ValueError(f"{where}: the chat template is nested too deep") from None
        self._reads_parts: bool | None = None

    def render(self, messages: Sequence[Message], **variables: Any) -> str:
        """Lists of text parts become plain strings, joined without anything between, where the template wants strings."""
        if any(isinstance(message.get("content"), list) for message in messages) and not self.reads_parts(variables):
            messages = [_joined_parts(message) for message in messages]
        return self._render(messages, variables)

    def reads_parts(self, variables: Mapping[str, Any]) -> bool:
        """Whether the template loops over content parts itself: a probe as a part renders as the same string does, or better."""
        if self._reads_parts is None:
            probe = "(probe)"
            plain = self._probe(probe, variables)
            parts = self._probe([{"type": "text", "text": probe}], variables)
            self._reads_parts = parts is not None and probe in parts and (plain is None or probe not in plain or parts == plain)
        return self._reads_parts

    def _probe(self, content: Any, variables: Mapping[str, Any]) -> str | None:
        try:
            return self._render([{"role": "user", "content": content}], {**variables, "tools": None})
        except ValueError:
            return None

    def _render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        try:
            return self._template.render(messages=[dict(message) for message in messages], **variables)
        except jinja2.TemplateError as error:
            raise ValueError(f"{self.where}: {error.message or type(error).__name__}") from None
        except (TypeError, KeyError, IndexError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"{self.where}: the chat template failed on these messages: {error}") from None


def _joined_parts(message: Message) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(f"content part of type {kind!r}: this model's chat template takes text only")
        texts.append(part["text"])
    return {**message, "content": "".join(texts)}


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks the assistant's words for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Unlike Jinja's own filter, without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
