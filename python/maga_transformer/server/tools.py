"""The tools of a request and what may be done with them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maga_transformer.request import Fault, RequestError, quote

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


@dataclass(frozen=True)
class Tools:
    """`listed`: as templates want them. `choice`: none, auto, required, or the name of the one tool that must be called."""

    listed: Sequence[Mapping[str, Any]] = ()
    choice: str = "none"
    named: bool = False  # choice is a name
    parallel: bool = True

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """Of the tools that may be called."""
        if not self.named and self.choice == "none":
            return {}
        functions = [tool["function"] for tool in self.listed]
        return {f["name"]: f.get("parameters") or {} for f in functions if not self.named or f["name"] == self.choice}

    @property
    def must_call(self) -> bool:
        return self.named or self.choice == "required"


def tools_of(tools: Any, choice: Any, parallel: bool | None) -> Tools:
    """OpenAI's three fields. An empty list is none: many clients send it."""
    if tools is not None and not isinstance(tools, list):
        raise RequestError(Fault.parameter, f"tools={quote(tools)}: must be a list of tools", "tools")
    return choose([_tool(f"tools[{index}]", tool) for index, tool in enumerate((tools or [])[: MAX_TOOLS + 1])], choice, parallel)


def choose(listed: Sequence[Mapping[str, Any]], choice: Any, parallel: bool | None) -> Tools:
    """`listed`: as `Tools` has them. `choice`: OpenAI's tool_choice."""
    if not listed:
        if choice not in (None, "none", "auto"):
            raise RequestError(Fault.parameter, f"tool_choice={quote(choice)} needs tools", "tool_choice")
        return Tools()
    if len(listed) > MAX_TOOLS:
        raise RequestError(Fault.parameter, f"tools: at most {MAX_TOOLS} functions", "tools")
    names = [tool["function"]["name"] for tool in listed]
    if choice is None or choice in ("none", "auto", "required"):
        return Tools(listed, choice or "auto", False, parallel is not False)
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in names:
        raise RequestError(
            Fault.parameter,
            f"tool_choice={quote(choice)}: must be none, auto, required, or a function of tools: {', '.join(names)[:200]}",
            "tool_choice",
        )
    return Tools(listed, name, True, False)


def _tool(place: str, tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function" or not isinstance(function, Mapping):
        raise RequestError(Fault.parameter, f'{place}={quote(tool)}: must be {{"type": "function", "function": {{...}}}}', place)
    return {"type": "function", "function": function_of(f"{place}.function", function)}


def function_of(place: str, function: Mapping[str, Any]) -> dict[str, Any]:
    """Checked, and without what is not for templates."""
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            Fault.parameter,
            f"{place}.name={quote(name)}: 1 to 64 letters, digits, or any of _ . -",
            f"{place}.name",
        )
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestError(
            Fault.parameter,
            f"{place}.parameters={quote(parameters)}: must be a JSON schema",
            f"{place}.parameters",
        )
    return {key: value for key, value in function.items() if value is not None and key != "strict"}
