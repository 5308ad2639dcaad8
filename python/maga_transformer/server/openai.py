"""OpenAI's routes: /v1/chat/completions, /v1/completions, /v1/models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from maga_transformer.request import Fault, Job, RequestError, quote
from maga_transformer.server.answers import answer
from maga_transformer.server.body import json_object
from maga_transformer.server.chat import (
    ChatPrompt,
    Conversation,
    effort_variables,
    render_chat,
    template_header,
    template_of_request,
)
from maga_transformer.server.errors import encode
from maga_transformer.server.prompts import compiled, encode_text
from maga_transformer.server.rtp_chat import debug_info, with_extra_configs
from maga_transformer.server.schemas import ChatRequest, CompletionRequest, OpenAIRequest, parse
from maga_transformer.server.shapes import ChatShape, CompletionShape
from maga_transformer.server.state import State
from maga_transformer.server.tools import tools_of
from maga_transformer.structured.grammar import Grammar


async def models(request: Request) -> Response:
    """The names that are served."""
    state = State.of(request)
    return Response(encode({"object": "list", "data": [_card(state, name) for name in state.names]}), media_type="application/json")


async def model(request: Request) -> Response:
    """One of them."""
    state = State.of(request)
    name = request.path_params["name"]
    if name not in state.names:
        raise unknown_model(state, name)
    return Response(encode(_card(state, name)), media_type="application/json")


def _card(state: State, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "maga_transformer",
        "root": state.names[0],
        "parent": None,
        "max_model_len": state.runtime.description.context,
    }


async def chat_completions(request: Request) -> Response:
    """Answers a conversation through the chat template; tool calls, thoughts, structured output."""
    state = State.of(request)
    asked, ignored = parse(ChatRequest, await json_object(request, state.body_limit), strict=state.runtime.config.strict)
    name = model_of(state, asked.model)
    prompt = await render_chat(state, conversation(state, asked))
    grammar = prompt.grammar(asked.grammar())
    job = await job_of(state, asked, prompt.ids, grammar, prompt)
    shape = ChatShape(
        state,
        name,
        prompt,
        include_reasoning=asked.include_reasoning is not False,
        ids_as_tokens=bool(asked.return_tokens_as_token_ids),
    )
    if asked.debug_info:
        shape.debug_info = debug_info(state, prompt, asked.stop or [])
    told = headers(ignored, len(prompt.ids) - len(job.prompt)) | template_header(prompt)
    return await answer(request, state, asked, [job], shape, told)


async def chat_render(request: Request) -> Response:
    """The prompt that a chat becomes, its ids and what ends its answer; nothing is generated."""
    state = State.of(request)
    asked, ignored = parse(ChatRequest, await json_object(request, state.body_limit), strict=state.runtime.config.strict)
    model_of(state, asked.model)
    prompt = await render_chat(state, conversation(state, asked))
    asked.grammar()  # without effect on the prompt, and refused as it would be where it has one
    return Response(
        encode(debug_info(state, prompt, asked.stop or [])),
        headers=headers(ignored, 0) | template_header(prompt),
        media_type="application/json",
    )


def conversation(state: State, asked: ChatRequest) -> Conversation:
    if asked.messages is None:
        raise RequestError(Fault.no_prompt, "messages is missing", "messages")
    template = template_of_request(state, asked.chat_template, "chat_template")
    template = template or template_of_request(state, asked.user_template, "user_template")
    automatic = state.runtime.config.enable_auto_tool_choice
    choice = asked.tool_choice if asked.tool_choice is not None or automatic else "none"
    return Conversation(
        messages=asked.messages,
        tools=tools_of(asked.tools, choice, asked.parallel_tool_calls),
        variables={**effort_variables(asked.reasoning_effort), **(asked.chat_template_kwargs or {})},
        documents=asked.documents or None,
        add_generation_prompt=asked.add_generation_prompt is not False,
        continue_final_message=bool(asked.continue_final_message),
        add_special_tokens=bool(asked.add_special_tokens),
        template=template,
        template_key=asked.template_key or None,
    )


async def completions(request: Request) -> Response:
    """Continues texts or token ids."""
    state = State.of(request)
    asked, ignored = parse(CompletionRequest, await json_object(request, state.body_limit), strict=state.runtime.config.strict)
    name = model_of(state, asked.model)
    prompts = await _prompts(state, asked)
    grammar = asked.grammar()
    jobs = [await job_of(state, asked, prompt, grammar) for prompt in prompts]
    echo = [state.runtime.tokenizer.decode(job.prompt) for job in jobs] if asked.echo else []
    shape = CompletionShape(state, name, asked.sequences, echo, ids_as_tokens=bool(asked.return_tokens_as_token_ids))
    cut = sum(map(len, prompts)) - sum(len(job.prompt) for job in jobs)
    return await answer(request, state, asked, jobs, shape, headers(ignored, cut))


def headers(ignored: Sequence[str], cut: int) -> dict[str, str]:
    """`cut`: prompt tokens that were left out."""
    told = {"X-Maga-Ignored": ", ".join(ignored)} if ignored else {}
    return told | ({"X-Maga-Truncated": f"{cut} prompt tokens"} if cut else {})


def model_of(state: State, name: str | None) -> str:
    if name and name not in state.names:
        raise unknown_model(state, name)
    return name or state.names[0]


def unknown_model(state: State, name: str) -> RequestError:
    return RequestError(
        Fault.unknown_model, f"The model `{name[:128]}` does not exist. Served here: {', '.join(state.names)}", "model"
    )


async def job_of(
    state: State, asked: OpenAIRequest, prompt: Sequence[int], grammar: Grammar | None, chat: ChatPrompt | None = None
) -> Job:
    # A word is banned at the beginning of the text and after a blank, which most vocabularies spell differently.
    spellings = [spelling for word in asked.bad_words or [] for spelling in (word, " " + word.lstrip(" "))]
    bad_words = [await encode_text(state, text, add_special_tokens=False, field="bad_words") for text in dict.fromkeys(spellings)]
    visible = chat.visible(state) if chat else frozenset[int]()
    sampling, seconds = asked.sampling(state.runtime.description.sampling_defaults, bad_words, visible), 0.0
    if isinstance(asked, ChatRequest) and asked.extra_configs:
        sampling, seconds = with_extra_configs(asked.extra_configs, sampling)
    return state.runtime.prepare(
        Job(
            prompt=_truncated(state, asked, prompt),
            sampling=sampling,
            sequences=asked.sequences,
            priority=asked.priority or 0,
            timeout_seconds=seconds,
            cache_salt=asked.cache_salt or "",
            grammar=await compiled(state, grammar),
        )
    )


def _truncated(state: State, asked: OpenAIRequest, prompt: Sequence[int]) -> Sequence[int]:
    """truncate_prompt_tokens: the last so many tokens; -1: as many as leave room for the answer."""
    most = asked.truncate_prompt_tokens
    if most is None:
        return prompt
    if most == -1:
        most = max(1, state.runtime.description.context - max(1, asked.token_limit() or asked.default_max_tokens or 1))
    return prompt[-most:]


async def _prompts(state: State, asked: CompletionRequest) -> list[Sequence[int]]:
    """A text, a list of texts, a list of ids, or a list of lists of ids. Ids are taken as they are."""
    prompt, limit, vocab = asked.prompt, state.runtime.config.max_queue, state.runtime.tokenizer.vocab_size
    if prompt is None:
        raise RequestError(Fault.no_prompt, "prompt is missing", "prompt")
    entries = prompt if isinstance(prompt, list) and any(isinstance(part, (str, list)) for part in prompt) else [prompt]
    if len(entries) > limit:
        raise RequestError(Fault.parameter, f"prompt has {len(entries)} entries; at most {limit} (MAX_QUEUE)", "prompt")
    prompts: list[Sequence[int]] = []
    for index, entry in enumerate(entries):
        place = "prompt" if entry is prompt else f"prompt[{index}]"
        if isinstance(entry, str):
            if not entry:
                raise RequestError(Fault.empty_prompt, f"{place} is empty", "prompt")
            special, whole = asked.add_special_tokens is not False, asked.truncate_prompt_tokens is None
            prompts.append(await encode_text(state, entry, add_special_tokens=special, whole=whole))
        elif isinstance(entry, list):
            bad = next(((at, part) for at, part in enumerate(entry) if type(part) is not int or not 0 <= part < vocab), None)
            if bad is not None:
                message = f"{place}[{bad[0]}]={quote(bad[1])}: must be a token id, valid: 0 to {vocab - 1}"
                raise RequestError(Fault.parameter, message, "prompt")
            prompts.append(entry)
        else:
            raise RequestError(Fault.parameter, f"{place}={quote(entry)}: must be text or a list of token ids", "prompt")
    return prompts
