"""A conversation to a prompt through the model's own chat template, and how to read the answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from maga_transformer.chat.dialect import Dialect
from maga_transformer.chat.fallback import without_tools
from maga_transformer.chat.named_templates import NAMED_TEMPLATES, fallback_template
from maga_transformer.chat.pieces import Reader
from maga_transformer.chat.tool_grammar import tool_grammar
from maga_transformer.request import Fault, RequestError, quote
from maga_transformer.server.messages import joined, length_of, turns_of
from maga_transformer.server.prompts import encode_text, off_loop
from maga_transformer.server.state import State
from maga_transformer.server.tools import Tools
from maga_transformer.structured.grammar import Grammar

_OURS = "messages tools documents add_generation_prompt continue_final_message chat_template template key"
_TRANSFORMERS = "conversation tokenize tokenizer_kwargs padding truncation max_length return_tensors return_dict"
_RESERVED = frozenset(f"{_OURS} {_TRANSFORMERS} self".split())  # self: Jinja's own
_MAX_VARIABLES = 64


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What every chat route asks for."""

    messages: Sequence[Any]
    tools: Tools = field(default_factory=Tools)
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the template
    documents: Sequence[Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False  # the template writes them itself
    template: str | None = None  # instead of the model's
    template_key: str | None = None  # which of the model's
    split_reasoning: bool = True


@dataclass(frozen=True)
class ChatPrompt:
    ids: list[int]
    text: str
    tools: Tools
    dialect: Dialect
    split_reasoning: bool
    fallback: str = ""  # name of the template that stood in for the model's

    def reader(self) -> Reader:
        """A new one for each answer."""
        most = None if self.tools.parallel else 1
        return self.dialect.reader(self.text, self.tools.schemas or None, most, split=self.split_reasoning)

    def visible(self, state: State) -> frozenset[int]:
        """Special tokens that the reader must see."""
        tokenizer = state.runtime.tokenizer
        found = {tokenizer.token_id(text) for text in self.dialect.markers(tools=bool(self.tools.schemas))}
        return frozenset(token for token in found if token is not None and token in tokenizer.special_ids) - tokenizer.eos_ids

    def grammar(self, asked: Grammar | None) -> Grammar | None:
        """What the answer must follow, once it has come behind its thoughts."""
        if self.tools.must_call and self.dialect.tools is not None:
            if asked is not None:
                raise RequestError(Fault.parameter, f"{asked.field} and tool_choice: only one of them can hold", asked.field)
            asked = tool_grammar(self.dialect.tools, self.tools.schemas, several=self.tools.parallel, field="tool_choice")
        elif self.tools.must_call:
            raise RequestError(
                Fault.unsupported, "tool_choice: calls of this model cannot be enforced; valid: auto, none", "tool_choice"
            )
        return asked and dataclasses.replace(asked, after=self.dialect.answer_begins_after(self.text))


def effort_variables(effort: str | None) -> dict[str, Any]:
    """How templates are told how much to think."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}


async def render_chat(state: State, asked: Conversation) -> ChatPrompt:
    tokenizer, dialect = state.runtime.tokenizer, state.dialect
    turns = turns_of(asked.messages)
    fallback = ""
    if not tokenizer.chat_template and asked.template is None:
        fallback = fallback_template(tokenizer.token_id, state.runtime.description.family)
    if asked.continue_final_message and (asked.add_generation_prompt or turns[-1]["role"] != "assistant"):
        raise RequestError(
            Fault.parameter,
            "continue_final_message needs add_generation_prompt: false, and an assistant's message as the last one",
            "continue_final_message",
        )
    if asked.template_key and asked.template_key not in tokenizer.template_names:
        raise RequestError(
            Fault.parameter,
            f"template_key={quote(asked.template_key)}: the model's templates are {', '.join(tokenizer.template_names) or 'none'}",
            "template_key",
        )
    variables = _variables(asked.variables, tokenizer.special_texts)
    shown = asked.tools.listed if asked.tools.named or asked.tools.choice != "none" else ()
    if not dialect.template_knows_tools:
        turns, shown = without_tools(turns, shown), ()

    def render() -> str:
        text = tokenizer.apply_chat_template(
            turns,
            list(shown) or None,
            add_generation_prompt=asked.add_generation_prompt,
            template=NAMED_TEMPLATES[fallback] if fallback else asked.template,
            key=asked.template_key,
            documents=asked.documents,
            **variables,
        )
        return _cut_behind(text, turns[-1]["content"]) if asked.continue_final_message else text

    try:
        text = await off_loop(state, length_of(turns), render)
    except ValueError as error:
        raise RequestError(Fault.parameter, f"messages: {error}", "messages") from None
    special = asked.add_special_tokens or fallback == "plain"  # which has none of its own
    ids = await encode_text(state, text, add_special_tokens=special, field="messages")
    return ChatPrompt(ids, text, asked.tools, dialect, asked.split_reasoning, fallback)


def template_of_request(state: State, template: str | None, name: str) -> str | None:
    if template and not state.runtime.config.trust_request_chat_template:
        message = f"{name}: this server takes none from requests (--trust-request-chat-template)"
        raise RequestError(Fault.unsupported, message, name)
    return template or None


def template_header(prompt: ChatPrompt) -> dict[str, str]:
    """Tells that the model's own words for a chat are not known."""
    return {"X-Maga-Chat-Template": f"{prompt.fallback} (the model has none)"} if prompt.fallback else {}


def _cut_behind(text: str, content: Any) -> str:
    """Without what the template writes behind the last message."""
    last = joined(content).strip()
    at = text.rfind(last) if last else -1
    if at < 0:
        raise ValueError("continue_final_message: the template does not show the last message as it is")
    return text[: at + len(last)]


def _variables(given: Mapping[str, Any], special: Mapping[str, str]) -> Mapping[str, Any]:
    name = "chat_template_kwargs"
    if len(given) > _MAX_VARIABLES:
        raise RequestError(Fault.parameter, f"{name} has {len(given)} members; at most {_MAX_VARIABLES}", name)
    for key, value in given.items():
        if not key.isidentifier() or key in _RESERVED or key in special:
            raise RequestError(Fault.parameter, f"{name}.{key[:64]}: cannot be set as a variable of the chat template", name)
        if isinstance(value, (dict, list)) and len(repr(value)) > 1 << 14:
            raise RequestError(Fault.parameter, f"{name}.{key[:64]}={quote(value)}: too large for a variable", name)
    return given
