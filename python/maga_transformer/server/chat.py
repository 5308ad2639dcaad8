"""Messages to a prompt, through the model's own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from maga_transformer.request import Fault, RequestError, quote
from maga_transformer.server.prompts import encode_text, off_loop
from maga_transformer.server.state import State

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_OTHER_PARTS = ("image_url", "input_audio", "video_url", "audio_url", "file")


async def render_chat(state: State, messages: Sequence[Any], *, add_generation_prompt: bool = True) -> list[int]:
    """Token ids. The template writes the beginning-of-text token itself, so none is added."""
    turns = [_message(index, message) for index, message in enumerate(messages)]
    if not turns:
        raise RequestError(Fault.no_prompt, "messages is an empty list", "messages")
    tokenizer = state.runtime.tokenizer
    if not tokenizer.chat_template:
        raise RequestError(
            Fault.unsupported, "the model has no chat template: use /v1/completions, or POST / with prompt", "messages"
        )
    characters = sum(_length(turn["content"]) for turn in turns)
    try:
        text = await off_loop(
            state, characters, lambda: tokenizer.apply_chat_template(turns, None, add_generation_prompt=add_generation_prompt)
        )
    except ValueError as error:
        raise RequestError(Fault.parameter, f"messages: {error}", "messages") from None
    return await encode_text(state, text, add_special_tokens=False, field="messages")


def _message(index: int, message: Any) -> dict[str, Any]:
    place = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(Fault.parameter, f"{place}={quote(message)}: must be an object with role and content", "messages")
    role = message.get("role")
    if role not in _ROLES:
        raise RequestError(Fault.parameter, f"{place}.role={quote(role)}: must be one of {', '.join(_ROLES)}", f"{place}.role")
    turn = {key: value for key, value in message.items() if value is not None}
    turn["role"] = "system" if role == "developer" else role
    turn["content"] = _content(place, message.get("content"), required=role != "assistant")
    return turn


def _content(place: str, content: Any, *, required: bool) -> str | list[dict[str, str]]:
    """Text parts stay parts: the template either loops over them, or gets them joined with nothing between."""
    if content is None and not required:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            Fault.parameter, f"{place}.content={quote(content)}: must be text or a list of text parts", f"{place}.content"
        )
    return [_part(f"{place}.content[{index}]", part) for index, part in enumerate(content)]


def _part(place: str, part: Any) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _OTHER_PARTS:
        raise RequestError(Fault.unsupported, f"{place}: the model takes no {kind} parts, only text", place)
    if kind != "text" or not isinstance(part.get("text"), str):
        raise RequestError(Fault.parameter, f'{place}={quote(part)}: must be {{"type": "text", "text": "..."}}', place)
    return {"type": "text", "text": part["text"]}


def _length(content: str | list[dict[str, str]]) -> int:
    return len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)
