"""The messages of a conversation, checked and in the form that chat templates expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from maga_transformer.request import Fault, RequestError, quote

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_OTHER_PARTS = ("image_url", "input_image", "input_audio", "video_url", "audio_url", "file", "input_file", "image")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # type -> its member


def turns_of(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Raises RequestError naming the message and its member."""
    turns = [_message(index, message) for index, message in enumerate(messages)]
    if not turns:
        raise RequestError(Fault.no_prompt, "messages is an empty list", "messages")
    return turns


def length_of(turns: Sequence[Mapping[str, Any]]) -> int:
    """In characters, about."""
    return sum(
        len(content) if isinstance(content := turn["content"], str) else sum(len(p["text"]) for p in content) for turn in turns
    )


def _message(index: int, message: Any) -> dict[str, Any]:
    place = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(Fault.parameter, f"{place}={quote(message)}: must be an object with role and content", "messages")
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(Fault.parameter, f"{place}.role={quote(role)}: must be one of {', '.join(ROLES)}", f"{place}.role")
    turn = {key: value for key, value in message.items() if value is not None}
    turn["role"] = "system" if role == "developer" else role
    turn["content"] = content_of(f"{place}.content", message.get("content"), required=role != "assistant")
    if turn.pop("tool_calls", None) not in (None, []):
        turn["tool_calls"] = _calls(f"{place}.tool_calls", message["tool_calls"])
    thought = turn.get("reasoning_content", turn.get("reasoning"))  # templates ask for it under either name
    if isinstance(thought, str):
        turn["reasoning_content"] = turn["reasoning"] = thought
    return turn


def content_of(place: str, content: Any, *, required: bool) -> str | list[dict[str, str]]:
    """Text parts stay parts: the template either loops over them, or gets them joined with nothing between."""
    if content is None and not required:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(Fault.parameter, f"{place}={quote(content)}: must be text or a list of text parts", place)
    return [_part(f"{place}[{index}]", part) for index, part in enumerate(content)]


def joined(content: str | Sequence[Mapping[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _part(place: str, part: Any) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _OTHER_PARTS:
        raise RequestError(Fault.unsupported, f"{place}: the model takes no {kind} parts, only text", place)
    if not isinstance(kind, str) or kind not in _TEXT_PARTS or not isinstance(part.get(_TEXT_PARTS[kind]), str):
        raise RequestError(Fault.parameter, f'{place}={quote(part)}: must be {{"type": "text", "text": "..."}}', place)
    return {"type": "text", "text": part[_TEXT_PARTS[kind]]}


def _calls(place: str, calls: Any) -> list[dict[str, Any]]:
    """Arguments become objects: templates write them as JSON themselves."""
    if not isinstance(calls, list):
        raise RequestError(Fault.parameter, f"{place}={quote(calls)}: must be a list of tool calls", place)
    return [_call(f"{place}[{index}]", call) for index, call in enumerate(calls)]


def _call(place: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(Fault.parameter, f"{place}={quote(call)}: must hold function with name and arguments", place)
    arguments = arguments_of(f"{place}.function.arguments", function.get("arguments"))
    kept = {key: call[key] for key in ("id", "index") if call.get(key) is not None}
    return {**kept, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def arguments_of(place: str, arguments: Any) -> dict[str, Any]:
    """Of a call: JSON text, or an object."""
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments) if arguments.strip() else {}
        except orjson.JSONDecodeError:
            raise RequestError(Fault.parameter, f"{place}={quote(arguments)}: must be JSON", place) from None
    if arguments is not None and not isinstance(arguments, dict):
        raise RequestError(Fault.parameter, f"{place}={quote(arguments)}: must be a JSON object", place)
    return arguments or {}
