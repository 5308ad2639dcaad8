"""Anthropic's request bodies, turned into the conversation that every chat route works on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from maga_transformer.generate_config import Finite, StopStrings, TopK, validate
from maga_transformer.request import Fault, RequestError, Sampling, quote
from maga_transformer.server.chat import Conversation
from maga_transformer.server.messages import arguments_of
from maga_transformer.server.tools import Tools, tools_of


class MessagesRequest(BaseModel):
    """Unknown fields (cache_control, betas and the like) are ignored: they change no answer."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    messages: list[Any] | None = None
    system: Any = None
    stream: bool | None = None
    temperature: Annotated[Finite, Field(ge=0, le=1e6)] | None = None
    top_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    top_k: TopK | None = None
    stop_sequences: StopStrings | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None

    def sampling(self, defaults: Mapping[str, Any], keep_special: frozenset[int]) -> Sampling:
        def pick(value: float | None, name: str, otherwise: float) -> float:
            return value if value is not None else float(defaults.get(name, otherwise))

        return Sampling(
            max_new_tokens=self.max_tokens,
            temperature=pick(self.temperature, "temperature", 1.0),
            top_k=int(pick(self.top_k, "top_k", 0)),
            top_p=pick(self.top_p, "top_p", 1.0),
            repetition_penalty=pick(None, "repetition_penalty", 1.0),
            stop_strings=self.stop_sequences or [],
            keep_special=keep_special,
        )


def parse(body: Mapping[str, Any], *, for_answer: bool) -> MessagesRequest:
    asked = validate(MessagesRequest, {key: value for key, value in body.items() if value is not None})
    if asked.messages is None:
        raise RequestError(Fault.no_prompt, "messages is missing", "messages")
    if for_answer and asked.max_tokens is None:
        raise RequestError(Fault.parameter, "max_tokens is missing", "max_tokens")
    return asked


def conversation(asked: MessagesRequest) -> Conversation:
    turns: list[dict[str, Any]] = []
    if asked.system not in (None, "", []):
        turns.append({"role": "system", "content": _text(asked.system, "system", others=False)})
    for index, message in enumerate(asked.messages or []):
        turns += _turns(f"messages[{index}]", message)
    thinking = (asked.thinking or {}).get("type")
    # A last message of the assistant is continued.
    continued = bool(turns) and turns[-1]["role"] == "assistant" and not turns[-1].get("tool_calls")
    return Conversation(
        messages=turns,
        tools=_tools(asked),
        variables={"enable_thinking": thinking != "disabled"} if thinking else {},
        add_generation_prompt=not continued,
        continue_final_message=continued,
    )


def _turns(place: str, message: Any) -> list[dict[str, Any]]:
    """One message may become several: results of tools are messages of their own in templates."""
    if not isinstance(message, Mapping):
        raise _bad(place, message, "must be an object with role and content")
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise RequestError(Fault.parameter, f"{place}.role={quote(role)}: must be user or assistant", f"{place}.role")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise _bad(f"{place}.content", content, "must be text or a list of blocks")
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for index, block in enumerate(content):
        at = f"{place}.content[{index}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind == "tool_use" and role == "assistant" and isinstance(block.get("name"), str):
            function = {"name": block["name"], "arguments": arguments_of(f"{at}.input", block.get("input"))}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            text = _text(block.get("content") or "", f"{at}.content")
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind in ("image", "document"):
            raise RequestError(Fault.unsupported, f"{at}: the model takes no {kind} blocks, only text", at)
        elif kind != "redacted_thinking":
            raise _bad(at, block, "must be a block of text, tool_use, tool_result or thinking")
    turns = list(results)
    if texts or calls or not results:
        turn: dict[str, Any] = {"role": role, "content": "".join(texts)}
        if calls:
            turn["tool_calls"] = calls
        if thoughts:
            turn["reasoning_content"] = "".join(thoughts)
        turns.append(turn)
    return turns


def _tools(asked: MessagesRequest) -> Tools:
    listed = []
    for index, tool in enumerate(asked.tools or []):
        place = f"tools[{index}]"
        if not isinstance(tool, Mapping) or tool.get("type", "custom") != "custom":
            raise RequestError(Fault.unsupported, f"{place}={quote(tool)}: only tools of the client are supported", place)
        function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema")}
        listed.append({"type": "function", "function": function})
    choice = asked.tool_choice or {}
    kinds: dict[Any, Any] = {None: None, "auto": "auto", "any": "required", "none": "none"}
    kind = choice.get("type")
    if kind == "tool":
        wanted: Any = {"type": "function", "function": {"name": choice.get("name")}}
    elif kind is None or (isinstance(kind, str) and kind in kinds):
        wanted = kinds[kind]
    else:
        raise _bad("tool_choice", choice, "its type must be auto, any, tool or none")
    return tools_of(listed, wanted, not choice.get("disable_parallel_tool_use"))


def _text(value: Any, place: str, *, others: bool = True) -> str:
    """Of a text, or of a list of text blocks; `others`: what kinds a tool's result may have besides is told as it is."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence):
        raise _bad(place, value, "must be text or a list of text blocks")
    texts = []
    for index, block in enumerate(value):
        if not isinstance(block, Mapping) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            if others and isinstance(block, Mapping) and block.get("type") not in ("text", "image", "document"):
                texts.append(json.dumps(block, ensure_ascii=False))
                continue
            raise _bad(f"{place}[{index}]", block, "must be a block of text")
        texts.append(block["text"])
    return "\n".join(texts)


def _bad(place: str, value: Any, valid: str) -> RequestError:
    return RequestError(Fault.parameter, f"{place}={quote(value)}: {valid}", place)
