"""How this model writes thoughts and tool calls: from its chat template, unless a flag says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from maga_transformer.chat import reasoning, tool_formats
from maga_transformer.chat.harmony import MARKERS as HARMONY_MARKERS
from maga_transformer.chat.harmony import HarmonyReader
from maga_transformer.chat.pieces import PlainReader, Reader
from maga_transformer.chat.reasoning import ReasoningFormat, ReasoningReader
from maga_transformer.chat.tool_formats import FALLBACK, ToolFormat
from maga_transformer.chat.tool_reader import ToolReader

AUTO, NONE = "auto", "none"
_HARMONY_NAMES = ("harmony", "openai", "openai_gptoss", "gpt_oss", "GptOss")
_HARMONY_ANSWER = "<|channel|>final<|message|>"


@dataclass(frozen=True)
class Dialect:
    tools: ToolFormat | None  # None: calls are left in the text
    reasoning: ReasoningFormat | None  # None: thoughts are left in the text
    harmony: bool = False  # of gpt-oss: both in one markup
    template_knows_tools: bool = True  # False: they are described in the system message

    def reader(
        self, prompt: str, schemas: Mapping[str, Mapping[str, Any]] | None, most: int | None, *, split: bool = True
    ) -> Reader:
        """Of one answer to `prompt`. `schemas` None: tool calls are not looked for. `split` False: nor are thoughts."""
        if self.harmony and split:
            return HarmonyReader(most)
        calls = ToolReader(self.tools, schemas, most) if schemas and self.tools else None
        if self.reasoning and split:
            return ReasoningReader(self.reasoning, calls, open=self.reasoning.begins_open(prompt))
        return calls or PlainReader()

    def markers(self, *, tools: bool) -> tuple[str, ...]:
        """Texts that the reader must see, even if they are special tokens."""
        if self.harmony:
            return HARMONY_MARKERS
        marks = (self.reasoning.open, self.reasoning.close) if self.reasoning else ()
        if not tools or not self.tools:
            return marks
        form = self.tools
        parts = [*form.around, *form.each, *(form.named or ()), *form.signs, *form.markers, *form.special]
        return (*marks, *(part.strip() for part in parts if part.strip()))

    def answer_begins_after(self, prompt: str) -> str:
        """What ends the thoughts that an answer to `prompt` begins with; "": it begins with none."""
        if self.harmony:
            return _HARMONY_ANSWER
        return self.reasoning.close if self.reasoning and self.reasoning.begins_open(prompt) else ""


def find_dialect(
    templates: Sequence[str],
    tool_parser: str = AUTO,
    reasoning_parser: str = AUTO,
    tags: tuple[str, str] | None = None,
    *,
    think: bool = False,
) -> Dialect:
    """`templates`: the sources of the model's chat templates. `tags`: the marks of a thought, where they are said; `think`: it has
    thoughts, even if the templates show none. ValueError for a parser that there is not."""
    source = "\n".join(templates)
    harmony = "<|channel|>analysis" in source or ("<|channel|>" in source and "<|message|>" in source)
    if (
        tool_parser in _HARMONY_NAMES
        or reasoning_parser in _HARMONY_NAMES
        or (harmony and tool_parser == reasoning_parser == AUTO and not tags)
    ):
        return Dialect(None, None, harmony=True)
    knows = "tools" in source
    tools = tool_formats.find_format(source) if knows else None
    thought = reasoning.find_format(source) or (reasoning.BY_NAME["think"] if think else None)
    if tags:
        begin, end = (tag.replace("\\n", "\n").strip() for tag in tags)
        thought = ReasoningFormat("tags", begin, end)
    dialect = Dialect(tools or FALLBACK, thought, template_knows_tools=knows)
    if tool_parser != AUTO:
        chosen = None if tool_parser == NONE else _named(tool_parser, tool_formats.BY_NAME, "tool_call_parser")
        dialect = replace(dialect, tools=chosen)
    if reasoning_parser != AUTO and not tags:
        thought = None if reasoning_parser == NONE else _named(reasoning_parser, reasoning.BY_NAME, "reasoning_parser")
        dialect = replace(dialect, reasoning=thought)
    return dialect


def _named(name: str, known: Mapping[str, Any], setting: str) -> Any:
    if name not in known:
        raise ValueError(f"{setting}={name}: valid: auto, none, harmony, {', '.join(known)}")
    return known[name]
