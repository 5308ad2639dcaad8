"""Bodies of OpenAI's Responses API, turned into the conversation that every chat route works on. Nothing is kept between requests,
so a body that leans on an earlier one is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from maga_transformer.request import Fault, RequestError, quote
from maga_transformer.server.chat import Conversation, effort_variables
from maga_transformer.server.messages import arguments_of, content_of, joined
from maga_transformer.server.schemas import UNSUPPORTED, OpenAIRequest, parse
from maga_transformer.server.tools import Tools, choose, function_of
from maga_transformer.structured.grammar import Grammar, from_response_format

_NOT_STORED = "no response is stored here; send the whole conversation in input"
NEEDS_STORE = {"previous_response_id": (), "conversation": (), "background": (False,), "store": (False,)}
_ROLES = ("user", "assistant", "system", "developer")
ITEMS = ("message", "reasoning", "function_call", "function_call_output")
_OF_A_TOOL = ("name", "description", "parameters")
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


class ResponsesRequest(OpenAIRequest):
    """vLLM's further fields are taken too."""

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **{name: neutral for name, neutral in UNSUPPORTED.items() if name not in NEEDS_STORE},
        "prompt": (),
        "truncation": ("disabled",),
        "context_management": ([],),
        "moderation": (),
        "max_tokens": (),
        "response_format": ({"type": "text"},),
        "logprobs": (False,),
        "messages": (),
        "n": (1,),
        "best_of": (1,),
        "use_beam_search": (False,),
        "length_penalty": (1.0,),
        "early_stopping": (False,),
        "prompt_logprobs": (),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
    }
    no_effect: ClassVar[frozenset[str]] = (OpenAIRequest.no_effect - {"metadata", "user"}) | {
        "max_tool_calls",  # of tools that run at the server: there are none
        "prompt_cache_options",
        "prompt_cache_retention",
    }

    input: Any = None
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    text: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None  # repeated in the response, as the next one is
    user: str | None = None

    def token_limit(self) -> int | None:
        return self.max_output_tokens

    def logprob_count(self) -> int:
        asked = self.top_logprobs or "message.output_text.logprobs" in (self.include or ())
        return (self.top_logprobs or 0) if asked else -1

    def grammar(self) -> Grammar | None:
        form = (self.text or {}).get("format")
        own, other = from_response_format(form, "text.format") if form is not None else None, super().grammar()
        if own and other:
            raise RequestError(Fault.parameter, f"{own.field} and {other.field}: only one of them can hold", other.field)
        return own or other


def parse_responses(body: Mapping[str, Any], *, strict: bool) -> tuple[ResponsesRequest, list[str]]:
    """The request, and the names of what was ignored: unknown fields, and tools that are no functions."""
    for name, neutral in NEEDS_STORE.items():
        if body.get(name) is not None and body[name] not in neutral:
            raise RequestError(Fault.unsupported, f"{name}={quote(body[name])}: {_NOT_STORED}", name)
    asked, ignored = parse(ResponsesRequest, {key: value for key, value in body.items() if key not in NEEDS_STORE}, strict=strict)
    if asked.input is None and not asked.instructions:
        raise RequestError(Fault.no_prompt, "input is missing", "input")
    others = [f"tools[{at}] ({str(kind)[:32]})" for at, kind in enumerate(_kinds(asked.tools or ())) if kind != "function"]
    if others and strict:
        raise RequestError(Fault.unsupported, f"{others[0]}: only functions are supported (--strict)", others[0].split(" ")[0])
    return asked, [*ignored, *(text for text in others if text.isascii() and text.isprintable())]


def conversation(asked: ResponsesRequest, *, automatic: bool) -> Conversation:
    """`automatic`: tools may be called where the request does not say so."""
    effort = (asked.reasoning or {}).get("effort")
    if effort is not None and effort not in _EFFORTS:
        raise RequestError(
            Fault.parameter, f"reasoning.effort={quote(effort)}: must be one of {', '.join(_EFFORTS)}", "reasoning.effort"
        )
    return Conversation(
        messages=_turns(asked),
        tools=_tools(asked, automatic),
        variables={**effort_variables(effort), **(asked.chat_template_kwargs or {})},
        add_special_tokens=bool(asked.add_special_tokens),
    )


def _turns(asked: ResponsesRequest) -> list[dict[str, Any]]:
    items = asked.input
    if not isinstance(items, (str, list, type(None))):
        raise RequestError(Fault.parameter, f"input={quote(items)}: must be text or a list of items", "input")
    turns: list[dict[str, Any]] = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    # An empty input is an empty turn: programs ask so whether anybody answers.
    for index, item in enumerate(items if isinstance(items, list) and items else [{"role": "user", "content": items or ""}]):
        _add(turns, f"input[{index}]" if isinstance(items, list) else "input", item)
    return turns


def _add(turns: list[dict[str, Any]], place: str, item: Any) -> None:
    """What a model said in a row (thoughts, text, calls) is one turn, and so are the system messages at the beginning."""
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if kind == "item_reference":
        raise RequestError(Fault.unsupported, f"{place}: {_NOT_STORED}", place)
    if kind not in ITEMS:
        raise RequestError(Fault.parameter, f"{place}={quote(item)}: its type must be one of {', '.join(ITEMS)}", place)
    if kind == "function_call_output":
        content = content_of(f"{place}.output", item.get("output"), required=True)
        turns.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        return
    role = item.get("role") if kind == "message" else "assistant"
    if role not in _ROLES:
        raise RequestError(Fault.parameter, f"{place}.role={quote(role)}: must be one of {', '.join(_ROLES)}", f"{place}.role")
    if kind == "message" and role == "user":
        turns.append({"role": role, "content": content_of(f"{place}.content", item.get("content"), required=True)})
    elif kind == "message" and role != "assistant":
        text = joined(content_of(f"{place}.content", item.get("content"), required=True))
        if len(turns) == 1 and turns[0]["role"] == "system":
            turns[0]["content"] += f"\n\n{text}"
        else:
            turns.append({"role": "system", "content": text})
    else:
        if not turns or turns[-1]["role"] != "assistant":
            turns.append({"role": "assistant", "content": ""})
        _said(turns[-1], kind, place, item)


def _said(turn: dict[str, Any], kind: str, place: str, item: Mapping[str, Any]) -> None:
    if kind == "message":
        turn["content"] += joined(content_of(f"{place}.content", item.get("content"), required=True))
    elif kind == "reasoning":
        turn["reasoning_content"] = turn.get("reasoning_content", "") + _thoughts(place, item)
    else:
        name = item.get("name")
        if not isinstance(name, str):
            raise RequestError(Fault.parameter, f"{place}.name={quote(name)}: must be the function's name", f"{place}.name")
        function = {"name": name, "arguments": arguments_of(f"{place}.arguments", item.get("arguments"))}
        turn.setdefault("tool_calls", []).append({"id": item.get("call_id"), "type": "function", "function": function})


def _thoughts(place: str, item: Mapping[str, Any]) -> str:
    """In full, where they are there; else what was summed up."""
    for name, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        parts = item.get(name) or []
        if not isinstance(parts, list) or any(
            not isinstance(part, Mapping) or part.get("type") != kind or not isinstance(part.get("text"), str) for part in parts
        ):
            raise RequestError(Fault.parameter, f"{place}.{name}={quote(parts)}: must be a list of {kind}", f"{place}.{name}")
        if parts:
            return "".join(part["text"] for part in parts)
    return ""


def _kinds(tools: Sequence[Any]) -> list[Any]:
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or not isinstance(tool.get("type"), str):
            raise RequestError(Fault.parameter, f"tools[{index}]={quote(tool)}: must be an object with a type", f"tools[{index}]")
    return [tool["type"] for tool in tools]


def _tools(asked: ResponsesRequest, automatic: bool) -> Tools:
    listed: list[dict[str, Any]] = [
        {"type": "function", "function": function_of(f"tools[{index}]", {key: tool[key] for key in _OF_A_TOOL if key in tool})}
        for index, tool in enumerate(asked.tools or ())
        if tool["type"] == "function"
    ]
    choice: Any = asked.tool_choice if asked.tool_choice is not None or automatic else "none"
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = choice.get("tools")
        names = [tool.get("name") for tool in allowed if isinstance(tool, Mapping)] if isinstance(allowed, list) else []
        listed = [tool for tool in listed if tool["function"]["name"] in names]
        choice = choice.get("mode") or "auto"
    elif isinstance(choice, Mapping) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    return choose(listed, choice, asked.parallel_tool_calls)
