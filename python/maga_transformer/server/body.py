"""Reading a request's JSON body: bounded in bytes and in time, whatever its content type says."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from maga_transformer.request import Fault, RequestError
from maga_transformer.server.streaming import ClientGone

SILENCE_SECONDS = 30.0


async def json_object(request: Request, limit: int) -> dict[str, Any]:
    """`limit` in bytes. curl's default content type is taken as well as application/json."""
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding not in ("", "identity"):
        raise RequestError(Fault.encoding, f"Content-Encoding {encoding[:32]!r} is not taken; send the body as it is")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limit:
        raise _too_large(limit)
    body = await _read(request, limit)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(Fault.body, f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    if not isinstance(value, dict):
        raise RequestError(Fault.body, f"the body must be a JSON object, not {_json_name(value)}")
    return value


async def _read(request: Request, limit: int) -> bytes:
    body = bytearray()
    stream = request.stream()
    while True:
        try:
            part = await asyncio.wait_for(anext(stream, None), SILENCE_SECONDS)
        except asyncio.TimeoutError:
            raise RequestError(Fault.slow_body, f"no byte of the body came for {SILENCE_SECONDS:.0f} s") from None
        except ClientDisconnect:
            raise ClientGone from None
        if part is None:
            return bytes(body)
        body += part
        if len(body) > limit:
            raise _too_large(limit)


def _too_large(limit: int) -> RequestError:
    return RequestError(Fault.too_large, f"the body is larger than the limit of {limit} bytes (MAX_BODY_MB)")


def _json_name(value: object) -> str:
    return {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")
