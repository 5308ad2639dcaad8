"""Worker status, metrics, and the tokenizer's routes."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from maga_transformer import __version__
from maga_transformer.request import Fault, RequestError, quote
from maga_transformer.server.body import json_object
from maga_transformer.server.chat import Conversation, render_chat
from maga_transformer.server.errors import encode
from maga_transformer.server.prompts import encode_text, off_loop
from maga_transformer.server.state import State
from maga_transformer.server.tools import tools_of


def _json(value: object, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")


async def version(request: Request) -> Response:
    """Of the server."""
    return _json({"version": __version__})


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
    body = await json_object(request, state.body_limit)
    text, wanted = _text(body.get("prompt")), body.get("return_offsets_mapping")
    if wanted is not None and not isinstance(wanted, bool):
        raise RequestError(Fault.body, f"return_offsets_mapping={quote(wanted)}: must be true or false", "return_offsets_mapping")
    ids = await encode_text(state, text)
    answer: dict[str, Any] = {
        "token_ids": ids,
        "tokens": [state.runtime.token_bytes[token].decode(errors="replace") for token in ids],
        "error": "",
    }
    if wanted:
        answer["offset_mapping"] = await off_loop(state, len(text), lambda: state.runtime.tokenizer.offsets(text))
    return _json(answer)


async def tokenize(request: Request) -> Response:
    """vLLM's shape: of a prompt, or of messages as the chat template renders them."""
    state = State.of(request)
    body = await json_object(request, state.body_limit)
    if isinstance(body.get("messages"), list):
        conversation = Conversation(
            messages=body["messages"],
            tools=tools_of(body.get("tools"), None, None),
            variables=_object(body.get("chat_template_kwargs"), "chat_template_kwargs"),
            add_generation_prompt=body.get("add_generation_prompt") is not False,
            continue_final_message=body.get("continue_final_message") is True,
            add_special_tokens=body.get("add_special_tokens") is True,
        )
        ids = (await render_chat(state, conversation)).ids
    else:
        ids = await encode_text(state, _text(body.get("prompt")), add_special_tokens=body.get("add_special_tokens") is not False)
    answer = {"count": len(ids), "max_model_len": state.runtime.description.context, "tokens": ids}
    if body.get("return_token_strs") is True:
        answer["token_strs"] = [state.runtime.tokenizer.token(token) for token in ids]
    return _json(answer)


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    state = State.of(request)
    tokens = (await json_object(request, state.body_limit)).get("tokens")
    vocab = state.runtime.tokenizer.vocab_size
    if not isinstance(tokens, list) or any(type(token) is not int or not 0 <= token < vocab for token in tokens):
        raise RequestError(Fault.parameter, f"tokens={quote(tokens)}: must be a list of token ids from 0 to {vocab - 1}", "tokens")
    return _json({"prompt": state.runtime.tokenizer.decode(tokens, skip_special_tokens=False)})


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


def _object(value: object, name: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(Fault.parameter, f"{name}={quote(value)}: must be an object", name)
    return value


def _text(prompt: object) -> str:
    if prompt is None:
        raise RequestError(Fault.no_prompt, "prompt is missing", "prompt")
    if not isinstance(prompt, str):
        raise RequestError(Fault.body, f"prompt={quote(prompt)}: must be text", "prompt")
    return prompt
