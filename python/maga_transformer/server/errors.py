"""Each fault's HTTP status and codes, in the shape of the route that failed."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.responses import Response

from maga_transformer.request import Fault, RequestError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Code:
    status: int
    raw: int  # RTP-LLM's error_code
    type: str  # OpenAI's error type
    code: str | None  # OpenAI's error code


_INVALID = "invalid_request_error"
CODES: dict[Fault, Code] = {
    Fault.body: Code(400, 507, _INVALID, "invalid_body"),
    Fault.no_prompt: Code(400, 509, _INVALID, "missing_prompt"),
    Fault.empty_prompt: Code(400, 510, _INVALID, "empty_prompt"),
    Fault.long_prompt: Code(400, 511, _INVALID, "context_length_exceeded"),
    Fault.stop_list: Code(400, 512, _INVALID, "invalid_value"),
    Fault.parameter: Code(400, 516, _INVALID, "invalid_value"),
    Fault.unsupported: Code(400, 515, _INVALID, "unsupported_parameter"),
    Fault.unknown_model: Code(404, 508, _INVALID, "model_not_found"),
    Fault.no_key: Code(401, 507, _INVALID, "invalid_api_key"),
    Fault.wrong_key: Code(403, 507, _INVALID, "permission_denied"),
    Fault.too_large: Code(413, 507, _INVALID, "request_too_large"),
    Fault.encoding: Code(415, 507, _INVALID, "unsupported_encoding"),
    Fault.slow_body: Code(408, 507, _INVALID, "request_timeout"),
    Fault.not_found: Code(404, 507, _INVALID, "not_found"),
    Fault.method: Code(405, 507, _INVALID, "method_not_allowed"),
    Fault.busy: Code(429, 409, "server_busy", "queue_full"),
    Fault.draining: Code(503, 409, "server_unavailable", "shutting_down"),
    Fault.loading: Code(503, 409, "unavailable_error", "loading_model"),
    Fault.update: Code(400, 601, _INVALID, "unsupported_update"),
    Fault.timeout: Code(504, 603, "timeout_error", "generation_timeout"),
    Fault.cancelled: Code(503, 499, "server_unavailable", "cancelled"),
    Fault.execution: Code(500, 606, "server_error", "execution_failed"),
    Fault.internal: Code(500, 514, "server_error", "internal_error"),
}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
RETRY_AFTER_SECONDS = {Fault.busy: "1", Fault.draining: "5", Fault.loading: "5"}


def raw_error(error: RequestError) -> dict[str, Any]:
    return {"error_code": CODES[error.fault].raw, "message": error.message}


def openai_error(error: RequestError) -> dict[str, Any]:
    code = CODES[error.fault]
    return {"error": {"message": error.message, "type": code.type, "param": error.field, "code": code.code}}


def anthropic_error(error: RequestError) -> dict[str, Any]:
    message = error.message
    if error.fault is Fault.long_prompt:  # what its clients look for before they shorten a conversation
        message = f"prompt is too long: {message}"
    kind = _ANTHROPIC_TYPES.get(CODES[error.fault].status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def kobold_error(error: RequestError) -> dict[str, Any]:
    return {"detail": {"msg": error.message, "type": CODES[error.fault].code}}


_TEXT, _TEXT_OR_NULL = {"type": "string"}, {"type": ["string", "null"]}


def _object(**members: Any) -> dict[str, Any]:
    return {"type": "object", "properties": members, "required": list(members)}


# JSON schemas of what the functions above make, by their names.
SHAPES: dict[str, dict[str, Any]] = {
    "raw_error": _object(error_code={"type": "integer"}, message=_TEXT),
    "openai_error": _object(error=_object(message=_TEXT, type=_TEXT, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL)),
    "anthropic_error": _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT)),
    "kobold_error": _object(detail=_object(msg=_TEXT, type=_TEXT_OR_NULL)),
}


_OPENAI_PATHS = re.compile(
    r"/(v1|v2|chat|completions|responses|models|embeddings|rerank|score|tokenize|detokenize|tokenizer_info)(/|$)"
)


def error_body(error: RequestError, path: str) -> dict[str, Any]:
    """In the shape of the route."""
    return writer(path)(error)


def writer(path: str) -> Callable[[RequestError], dict[str, Any]]:
    """What writes the errors of a route."""
    if path.startswith("/v1/messages"):
        return anthropic_error
    if path.startswith("/api/"):
        return kobold_error
    return openai_error if _OPENAI_PATHS.match(path) else raw_error


def error_response(error: RequestError, path: str) -> Response:
    body = error_body(error, path)
    headers = {"Retry-After": RETRY_AFTER_SECONDS[error.fault]} if error.fault in RETRY_AFTER_SECONDS else None
    return Response(encode(body), CODES[error.fault].status, headers, "application/json")


def as_request_error(error: Exception) -> RequestError:
    """Anything unforeseen is logged with its traceback and reaches the client without it."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, RecursionError):
        return RequestError(Fault.body, "the body is nested too deep")
    log.error("unexpected error while serving a request", exc_info=error)
    return RequestError(Fault.internal, "internal error; the server's log has the details")


def encode(value: Any) -> bytes:
    return orjson.dumps(value)
