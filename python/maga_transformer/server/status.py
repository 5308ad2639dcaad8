"""Worker status, metrics, and the tokenizer's routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from maga_transformer import __version__
from maga_transformer.generate_config import validate
from maga_transformer.request import Fault, RequestError, quote
from maga_transformer.server.body import json_object
from maga_transformer.server.chat import Conversation, render_chat, template_of_request
from maga_transformer.server.errors import encode
from maga_transformer.server.prompts import encode_text, off_loop
from maga_transformer.server.state import State
from maga_transformer.server.tools import tools_of

Body = TypeVar("Body", bound=BaseModel)


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class _PromptRequest(_Body):
    prompt: str | None = None


class EncodeRequest(_PromptRequest):
    return_offsets_mapping: bool = False


class TokenizeRequest(_PromptRequest):
    messages: list[Any] | None = None  # instead of the prompt
    tools: list[Any] | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None  # None: to a prompt, not to messages
    return_token_strs: bool = False


class DetokenizeRequest(_Body):
    tokens: list[int] | None = None


def _json(value: object, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")


async def version(request: Request) -> Response:
    """Of the server."""
    return _json({"version": __version__})


async def openapi(request: Request) -> Response:
    """The OpenAPI document of these routes."""
    return Response(State.of(request).document(), media_type="application/json")


async def worker_status(request: Request) -> Response:
    """Load and room, in RTP-LLM's words."""
    runtime = State.of(request).runtime
    stats = runtime.engine.stats()
    page_tokens = runtime.config.seq_size_per_block
    limit = runtime.config.concurrency_limit or runtime.config.max_num_seqs + runtime.config.max_queue
    free = max(0, limit - runtime.in_flight)
    busy = sum(stats[part + "_seconds"] for part in ("model", "sample", "host"))
    return _json(
        {
            "alive": not runtime.draining,
            "available_concurrency": free,
            "onflight_requests": runtime.in_flight,
            "running": stats["running"],
            "waiting": stats["waiting"],
            "total_kv_cache": stats["pages_total"] * page_tokens,
            "available_kv_cache": (stats["pages_free"] + stats["pages_cached"]) * page_tokens,
            "iterate_count": stats["steps"],
            "frontend_available_concurrency": free,
            "backend_available_concurrency": free,
            "step_latency_ms": 1e3 * busy / max(1, stats["steps"]),
            "machine_info": runtime.description.device,
        }
    )


async def metrics(request: Request) -> Response:
    """Prometheus."""
    return Response(State.of(request).metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def tokenizer_encode(request: Request) -> Response:
    """RTP-LLM's shape."""
    state = State.of(request)
    asked = await _parse(request, EncodeRequest)
    text = _prompt(asked)
    ids = await encode_text(state, text)
    answer: dict[str, Any] = {
        "token_ids": ids,
        "tokens": [state.runtime.token_bytes[token].decode(errors="replace") for token in ids],
        "error": "",
    }
    if asked.return_offsets_mapping:
        try:
            answer["offset_mapping"] = await off_loop(state, len(text), lambda: state.runtime.tokenizer.offsets(text))
        except ValueError as error:
            raise RequestError(Fault.unsupported, f"return_offsets_mapping: {error}", "return_offsets_mapping") from None
    return _json(answer)


async def tokenize(request: Request) -> Response:
    """vLLM's shape: of a prompt, or of messages as the chat template renders them."""
    state = State.of(request)
    asked = await _parse(request, TokenizeRequest)
    if asked.messages is not None:
        conversation = Conversation(
            messages=asked.messages,
            tools=tools_of(asked.tools, None, None),
            variables=asked.chat_template_kwargs or {},
            template=template_of_request(state, asked.chat_template, "chat_template"),
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=asked.continue_final_message,
            add_special_tokens=bool(asked.add_special_tokens),
        )
        ids = (await render_chat(state, conversation)).ids
    else:
        ids = await encode_text(state, _prompt(asked), add_special_tokens=asked.add_special_tokens is not False)
    answer = {"count": len(ids), "max_model_len": state.runtime.description.context, "tokens": ids}
    if asked.return_token_strs:
        answer["token_strs"] = [state.runtime.tokenizer.token(token) for token in ids]
    return _json(answer)


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    state = State.of(request)
    asked = await _parse(request, DetokenizeRequest)
    if asked.tokens is None:
        raise RequestError(Fault.no_prompt, "tokens is missing", "tokens")
    vocab = state.runtime.tokenizer.vocab_size
    for index, token in enumerate(asked.tokens):
        if not 0 <= token < vocab:
            raise RequestError(
                Fault.parameter, f"tokens[{index}]={quote(token)}: outside the vocabulary, valid: 0 to {vocab - 1}", "tokens"
            )
    return _json({"prompt": state.runtime.tokenizer.decode(asked.tokens, skip_special_tokens=False)})


async def tokenizer_info(request: Request) -> Response:
    """As lm-eval's remote tokenizer reads it."""
    state = State.of(request)
    tokenizer = state.runtime.tokenizer
    return _json(
        {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": state.runtime.description.context,
            "bos_token": None,
            "eos_token": None,
            "pad_token": None,
            "unk_token": None,
            **tokenizer.special_texts,
            "chat_template": tokenizer.chat_template,
        }
    )


async def _parse(request: Request, kind: type[Body]) -> Body:
    body = await json_object(request, State.of(request).body_limit)
    return validate(kind, {name: value for name, value in body.items() if value is not None})


def _prompt(asked: _PromptRequest) -> str:
    if asked.prompt is None:
        raise RequestError(Fault.no_prompt, "prompt is missing", "prompt")
    return asked.prompt
