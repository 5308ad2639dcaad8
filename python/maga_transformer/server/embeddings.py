"""Embeddings, similarity and reranking: OpenAI's /v1/embeddings, RTP-LLM's /v1/embeddings/similarity and /v1/reranker, and the
/rerank and /score of Jina's and vLLM's clients."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, get_args
from uuid import uuid4

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from maga_transformer.embedding import Input, Vector, unit
from maga_transformer.generate_config import validate
from maga_transformer.models.task import EMBED, SCORE
from maga_transformer.request import Fault, RequestError, quote
from maga_transformer.server.body import json_object
from maga_transformer.server.errors import encode
from maga_transformer.server.generation import failure
from maga_transformer.server.prompts import off_loop
from maga_transformer.server.state import State
from maga_transformer.server.streaming import unless_gone


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    model: str | None = None


Kind = Literal["dense", "sparse", "colbert"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class _Config(BaseModel):
    """RTP-LLM's embedding_config."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    type: Kind = "dense"
    do_normalize: bool | None = None


class EmbeddingRequest(_Body):
    input: Any = None
    prompt: Any = None  # on the raw route
    encoding_format: str = "float"
    dimensions: int | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    embedding_config: _Config = _Config()


class SimilarityRequest(_Body):
    left: Any = None
    right: Any = None
    embedding_config: _Config = _Config()
    return_response: bool = False


class RerankRequest(_Body):
    query: str | None = None
    documents: list[Any] | None = None
    top_n: int | None = Field(None, ge=1)
    top_k: int | None = Field(None, ge=1)
    truncation: bool = True
    return_documents: bool = True
    normalize: bool = True


class ScoreRequest(_Body):
    text_1: Any = None
    text_2: Any = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1)


async def embeddings(request: Request) -> Response:
    """Vectors of texts, of a model that embeds."""
    return await _answer(request, await _parse(request, EmbeddingRequest))


def _embeddings_of(kind: Kind) -> Callable[[Request], Awaitable[Response]]:
    """The route of one kind, whatever embedding_config.type says."""

    async def route(request: Request) -> Response:
        """As /v1/embeddings, of this kind."""
        asked = await _parse(request, EmbeddingRequest)
        config = asked.embedding_config.model_copy(update={"type": kind})
        return await _answer(request, asked.model_copy(update={"embedding_config": config}))

    return route


OF_KINDS = {kind: _embeddings_of(kind) for kind in KINDS}


async def _answer(request: Request, asked: EmbeddingRequest) -> Response:
    state = State.of(request)
    name = _model(state, asked)
    embedder = state.runtime.embedder
    embedder.require(EMBED)
    if asked.encoding_format not in ("float", "base64"):
        raise RequestError(
            Fault.parameter, f"encoding_format={quote(asked.encoding_format)}: valid: float, base64", "encoding_format"
        )
    given = asked.input if asked.input is not None else asked.prompt
    inputs = await _inputs(state, given, "input", asked.truncate_prompt_tokens)
    kind, given_too = asked.embedding_config.type, {"dimensions": asked.dimensions, "encoding_format": asked.encoding_format}
    for field, value in given_too.items():
        if kind != "dense" and value not in (None, "float"):
            raise RequestError(Fault.parameter, f"{field} is for dense embeddings, not for {kind} ones", field)
    if asked.dimensions is not None:  # before the work is done
        embedder.embedding(np.ones(state.runtime.description.embedding_width, np.float32), dimensions=asked.dimensions)
    found = await _embed(request, state, inputs, asked.embedding_config, asked.dimensions, asked.normalize)
    return _json(_embedding_list(name, inputs, found, asked.encoding_format))


async def similarity(request: Request) -> Response:
    """The cosine of every left text and every right one; of sparse embeddings the product of what both have; of colbert ones the
    best match of each left token, on average."""
    state = State.of(request)
    asked = await _parse(request, SimilarityRequest)
    name = _model(state, asked)
    state.runtime.embedder.require(EMBED)
    sides = [await _inputs(state, side, field, None) for side, field in ((asked.left, "left"), (asked.right, "right"))]
    found = await _embed(request, state, [*sides[0], *sides[1]], asked.embedding_config)
    left, right = found[: len(sides[0])], found[len(sides[0]) :]
    kind = asked.embedding_config.type
    answer: dict[str, Any] = {"model": name, "type": kind, "similarity": [[_ALIKE[kind](a, b) for b in right] for a in left]}
    if asked.return_response:
        answer["left_response"] = _embedding_list(name, sides[0], left, "float")
        answer["right_response"] = _embedding_list(name, sides[1], right, "float")
    return _json(answer)


async def reranker(request: Request) -> Response:
    """RTP-LLM's shape."""
    _, results, tokens = await _rerank(request)
    found = [{"index": i, "document": text, "relevance_score": score} for i, text, score in results]
    return _json({"results": found, "total_tokens": tokens})


async def rerank(request: Request) -> Response:
    """Jina's shape, which vLLM speaks too."""
    asked, results, tokens = await _rerank(request)
    found = [
        {"index": i, **({"document": {"text": text}} if asked.return_documents else {}), "relevance_score": score}
        for i, text, score in results
    ]
    name = _model(State.of(request), asked)
    return _json({"id": f"rerank-{uuid4().hex}", "model": name, "usage": {"total_tokens": tokens}, "results": found})


async def score(request: Request) -> Response:
    """vLLM's shape: one text against several, or as many against as many."""
    state = State.of(request)
    asked = await _parse(request, ScoreRequest)
    name = _model(state, asked)
    first, second = _texts(asked.text_1, "text_1"), _texts(asked.text_2, "text_2")
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise RequestError(Fault.parameter, f"text_1 has {len(first)} texts and text_2 {len(second)}", "text_2")
    scores, tokens = await _relevance(request, state, first, second, asked.truncate_prompt_tokens, True)
    data = [{"index": i, "object": "score", "score": value} for i, value in enumerate(scores)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return _json({"id": f"score-{uuid4().hex}", "object": "list", "model": name, "data": data, "usage": usage})


async def _rerank(request: Request) -> tuple[RerankRequest, list[tuple[int, str, float]], int]:
    """The best first."""
    state = State.of(request)
    asked = await _parse(request, RerankRequest)
    _model(state, asked)
    if not asked.query:
        raise RequestError(Fault.no_prompt, "query is missing", "query")
    documents = _texts(asked.documents, "documents")
    truncate = -1 if asked.truncation else None
    scores, tokens = await _relevance(request, state, [asked.query] * len(documents), documents, truncate, asked.normalize)
    order = sorted(range(len(documents)), key=lambda i: -scores[i])[: asked.top_n or asked.top_k]
    return asked, [(i, documents[i], scores[i]) for i in order], tokens


async def _relevance(
    request: Request, state: State, first: Sequence[str], second: Sequence[str], truncate: int | None, normalize: bool
) -> tuple[list[float], int]:
    """By the model's own scores of pairs, or by the cosine of embeddings; and how many tokens that took."""
    embedder = state.runtime.embedder
    embedder.require(EMBED, SCORE)
    if embedder.task.kind == SCORE:
        pairs = list(zip(first, second, strict=True))
        characters = sum(len(a) + len(b) for a, b in pairs)
        inputs = await off_loop(
            state, characters, lambda: [embedder.encode(a, b, truncate=truncate, field="text") for a, b in pairs]
        )
        logits = await _run(request, state, inputs)
        return [embedder.relevance(row, normalize=normalize) for row in logits], sum(len(item.ids) for item in inputs)
    texts = list(dict.fromkeys([*first, *second]))
    inputs = await _inputs(state, texts, "text", truncate)
    vectors = dict(zip(texts, await _embed(request, state, inputs, _Config()), strict=True))
    return [_cosine(vectors[a], vectors[b]) for a, b in zip(first, second, strict=True)], sum(len(item.ids) for item in inputs)


async def _embed(
    request: Request,
    state: State,
    inputs: Sequence[Input],
    config: _Config,
    dimensions: int | None = None,
    normalize: bool | None = None,
) -> list[Any]:
    """Vectors; weights by token id for sparse embeddings; (tokens, width) for colbert ones."""
    embedder = state.runtime.embedder
    if config.type != "dense":
        embedder.require_multi_vector()
    wanted = config.do_normalize if normalize is None else normalize
    rows = await _run(request, state, inputs)
    if config.type == "sparse":
        return [embedder.lexical_weights(row, item.ids) for row, item in zip(rows, inputs, strict=True)]
    if config.type == "colbert":
        unit_length = wanted is not False
        return [embedder.token_vectors(row, item.ids, normalize=unit_length) for row, item in zip(rows, inputs, strict=True)]
    return [embedder.embedding(row, dimensions=dimensions, normalize=wanted) for row in rows]


async def _run(request: Request, state: State, inputs: Sequence[Input]) -> list[Vector]:
    """The engine's rows, in order; what still runs is cancelled when one fails or the client goes away."""
    runtime, loop = state.runtime, asyncio.get_running_loop()
    results: list[asyncio.Future[Vector]] = [loop.create_future() for _ in inputs]
    requests: list[int] = []

    def sink(event: Any, result: asyncio.Future[Vector]) -> None:
        if not result.done():
            if event.finish == "stop":
                result.set_result(event.embedding)
            else:
                result.set_exception(failure(event))

    try:
        for item, result in zip(inputs, results, strict=True):
            requests.append(runtime.submit(runtime.prepare_input(item), lambda event, result=result: sink(event, result)))  # type: ignore[misc]
        return list(await unless_gone(request, asyncio.gather(*results)))
    finally:
        for number, result in zip(requests, results, strict=False):
            if not result.done() or result.cancelled():
                runtime.cancel(number)
        for result in results:
            result.cancel()


async def _inputs(state: State, given: object, field: str, truncate: int | None) -> list[Input]:
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    if given is None:
        raise RequestError(Fault.no_prompt, f"{field} is missing", field)
    embedder = state.runtime.embedder
    if isinstance(given, list) and given and all(type(part) is int for part in given):
        given = [given]
    if isinstance(given, list) and given and all(isinstance(part, list) and all(type(id) is int for id in part) for part in given):
        _check_count(state, given, field)
        limit = embedder.max_tokens if truncate == -1 else truncate
        return [embedder.check(Input(ids if limit is None else ids[:limit]), field) for ids in given]
    texts = _texts(given, field)
    _check_count(state, texts, field)
    characters = sum(len(text) for text in texts)
    return await off_loop(state, characters, lambda: [embedder.encode(text, truncate=truncate, field=field) for text in texts])


def _check_count(state: State, inputs: Sequence[object], field: str) -> None:
    limit = state.runtime.config.max_queue
    if len(inputs) > limit:
        raise RequestError(Fault.parameter, f"{field} has {len(inputs)} entries; at most {limit} (MAX_QUEUE)", field)


def _texts(given: object, field: str) -> list[str]:
    """Texts, or Jina's {"text": ...}."""
    if given is None:
        raise RequestError(Fault.no_prompt, f"{field} is missing", field)
    parts = given if isinstance(given, list) else [given]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    if not texts:
        raise RequestError(Fault.empty_prompt, f"{field} is empty", field)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise RequestError(Fault.parameter, f"{field}[{index}]={quote(text)}: must be text or a list of token ids", field)
        if not text:
            raise RequestError(Fault.empty_prompt, f"{field}[{index}] is empty", field)
    return [text for text in texts if isinstance(text, str)]


async def _parse(request: Request, kind: type[Any]) -> Any:
    body = await json_object(request, State.of(request).body_limit)
    return validate(kind, {name: value for name, value in body.items() if value is not None})


def _model(state: State, asked: _Body) -> str:
    if asked.model and asked.model not in state.names:
        raise RequestError(
            Fault.unknown_model, f"The model `{asked.model[:128]}` does not exist. Served here: {', '.join(state.names)}", "model"
        )
    return asked.model or state.names[0]


def _embedding_list(model: str, inputs: Sequence[Input], found: Sequence[Any], encoding: str) -> dict[str, Any]:
    tokens = sum(len(item.ids) for item in inputs)
    return {
        "object": "list",
        "data": [{**_shown(each, encoding), "index": index} for index, each in enumerate(found)],
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _shown(found: Any, encoding: str) -> dict[str, Any]:
    if isinstance(found, dict):
        return {"object": "sparse_embedding", "embedding": {str(token): weight for token, weight in found.items()}}
    kind = "embedding" if found.ndim == 1 else "colbert_embedding"
    packed = encoding == "base64"
    return {"object": kind, "embedding": base64.b64encode(found.astype("<f4").tobytes()).decode() if packed else found.tolist()}


def _cosine(a: Vector, b: Vector) -> float:
    return float(np.dot(unit(a), unit(b)))


def _shared_weight(a: dict[int, float], b: dict[int, float]) -> float:
    return sum(weight * b[token] for token, weight in a.items() if token in b)


def _best_matches(a: Vector, b: Vector) -> float:
    return float((a @ b.T).max(axis=1).mean()) if len(a) and len(b) else 0.0


_ALIKE: dict[str, Callable[[Any, Any], float]] = {"dense": _cosine, "sparse": _shared_weight, "colbert": _best_matches}


def _json(value: object) -> Response:
    return Response(encode(value), media_type="application/json")
