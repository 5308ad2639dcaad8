"""How the families write tool calls. A format is found by what its chat template says, or named by --tool-call-parser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Arguments = Mapping[str, Any]
Schemas = Mapping[str, Mapping[str, Any]]  # tool -> the JSON schema of its parameters


@dataclass(frozen=True)
class ToolFormat:
    """Calls stand between `open` and `close`. Each is a JSON object that holds name and arguments; or, with `header`, a name in a
    header before the JSON object of its arguments; or, with `read`, markup of another kind that is read as a whole."""

    name: str
    open: str = ""  # "": the whole answer is a call if it begins with a brace
    close: str = ""  # "": the end of the answer
    signs: tuple[str, ...] = ()  # one of them in the chat template tells the format; (): its `open` does
    header: re.Pattern[str] | None = None  # its group is the name
    read: Callable[[str, Schemas], tuple[str, Arguments] | None] | None = None
    # What a constrained answer is made of (chat/tool_grammar.py): around all calls, around each, between two.
    around: tuple[str, str] = ("", "")
    each: tuple[str, str] = ("", "")
    between: str = ""
    arguments_key: str = "arguments"
    named: tuple[str, str] | None = None  # of a headed call: before the name, and between it and the arguments
    special: tuple[str, ...] = ()  # further marks that may be special tokens, which texts leave out otherwise
    aliases: tuple[str, ...] = ()  # vLLM's names for it

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(marker for marker in (self.open, self.close) if marker)


def _qwen_xml(body: str, schemas: Schemas) -> tuple[str, Arguments] | None:
    name = re.search(r"<function=([^>\n]+)>", body)
    if name is None:
        return None
    pairs = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|(?=</function>)|$)", body, re.DOTALL)
    called = name[1].strip()
    return called, {key.strip(): _typed(value, schemas.get(called), key.strip()) for key, value in pairs}


def _glm_xml(body: str, schemas: Schemas) -> tuple[str, Arguments] | None:
    called = body.partition("<arg_key>")[0].strip()
    if not called or called.startswith("{"):
        return None
    pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", body, re.DOTALL)
    return called, {key.strip(): _typed(value.strip("\n"), schemas.get(called), key.strip()) for key, value in pairs}


def _typed(value: str, schema: Mapping[str, Any] | None, key: str) -> Any:
    """These formats write texts without quotes: the schema tells which they are."""
    properties = (schema or {}).get("properties")
    member = properties.get(key) if isinstance(properties, Mapping) else None
    if isinstance(member, Mapping) and member.get("type") == "string":
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


_NAME = r"([A-Za-z0-9_.\-]+)"
FORMATS = (
    ToolFormat(
        "qwen3_xml", "<tool_call>", "</tool_call>", ("<function=",), read=_qwen_xml, aliases=("qwen3_coder", "step3p5", "nemotron")
    ),
    ToolFormat("glm", "<tool_call>", "</tool_call>", ("<arg_key>",), read=_glm_xml, aliases=("glm45", "glm47")),
    ToolFormat(
        "hermes",
        "<tool_call>",
        "</tool_call>",
        each=("<tool_call>\n", "\n</tool_call>"),
        between="\n",
        aliases=("qwen", "qwen25", "qwen3", "xlam"),
    ),
    ToolFormat(
        "deepseek",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        header=re.compile(r"(?:function<｜tool▁sep｜>)?" + _NAME + r"\s*(?:<｜tool▁sep｜>|```json|$)"),
        around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        each=("", "\n```<｜tool▁call▁end｜>"),
        between="\n",
        named=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n"),
        special=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        aliases=("deepseek_v3", "deepseek_v31", "deepseek_r1"),
    ),
    ToolFormat(
        "kimi",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        header=re.compile(r"(?:functions\.)?" + _NAME + r":\d+"),
        around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        each=("", "<|tool_call_end|>"),
        named=("<|tool_call_begin|>functions.", ":0<|tool_call_argument_begin|>"),
        special=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        aliases=("kimi_k2",),
    ),
    ToolFormat(
        "mistral_args",
        "[TOOL_CALLS]",
        "",
        ("[ARGS]",),
        header=re.compile(_NAME + r"(?:\[CALL_ID\]\w+)?\[ARGS\]"),
        named=("[TOOL_CALLS]", "[ARGS]"),
    ),
    ToolFormat("mistral", "[TOOL_CALLS]", around=("[TOOL_CALLS] [", "]"), between=", "),
    ToolFormat(
        "internlm",
        "<|action_start|>",
        "<|action_end|>",
        ("<|plugin|>",),
        around=("<|action_start|><|plugin|>\n", "<|action_end|>"),
        arguments_key="parameters",
        special=("<|action_start|>", "<|plugin|>"),
        aliases=("internlm2",),
    ),
    ToolFormat(
        "granite",
        "<|tool_call|>",
        "<|/tool_call|>",
        around=("<|tool_call|>[", "]"),
        between=", ",
        aliases=("phi4", "granite-20b-fc"),
    ),
    ToolFormat("phi4_mini", "functools", around=("functools[", "]"), between=", ", aliases=("phi4_mini_json",)),
    ToolFormat(
        "cohere",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        around=("<|START_ACTION|>[", "]<|END_ACTION|>"),
        between=", ",
        arguments_key="parameters",
    ),
    ToolFormat("jamba", "<tool_calls>", "</tool_calls>", around=("<tool_calls>[", "]</tool_calls>"), between=", "),
    ToolFormat(
        "llama3_json",
        "",
        "",
        ("<|python_tag|>", '"parameters": dictionary'),
        between="; ",
        arguments_key="parameters",
        special=("<|python_tag|>",),
        aliases=("llama3", "llama4_json", "llama"),
    ),
)
BY_NAME = {name: form for form in FORMATS for name in (form.name, *form.aliases)}
FALLBACK = BY_NAME["hermes"]


def find_format(template: str) -> ToolFormat | None:
    """Of a template that knows tools. None: it does not say how calls look."""
    return next((form for form in FORMATS if any(sign in template for sign in form.signs or (form.open,))), None)
