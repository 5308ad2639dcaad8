"""Tools for a model whose template has no place for them: described in the system message, in the form that most models know."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_TEXT = """You may call functions to help with the user's request. These are their signatures, one JSON object a line:
<tools>
{tools}
</tools>
To call a function, answer with its name and its arguments as JSON between tags, once for each call:
<tool_call>
{{"name": "NAME", "arguments": {{}}}}
</tool_call>"""


def without_tools(turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation in roles that every template has: system, user, assistant."""
    plain = [_plain(turn) for turn in turns]
    if not tools:
        return plain
    described = _TEXT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if plain and plain[0]["role"] == "system":
        plain[0] = {**plain[0], "content": f"{_joined(plain[0]['content'])}\n\n{described}"}
        return plain
    return [{"role": "system", "content": described}, *plain]


def _plain(turn: Mapping[str, Any]) -> dict[str, Any]:
    if turn["role"] in ("tool", "function"):
        return {"role": "user", "content": f"<tool_response>\n{_joined(turn['content'])}\n</tool_response>"}
    calls = turn.get("tool_calls")
    if not calls:
        return dict(turn)
    texts = [_joined(turn["content"])] if turn["content"] else []
    texts += [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls]
    return {"role": turn["role"], "content": "\n".join(texts)}


def _joined(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
