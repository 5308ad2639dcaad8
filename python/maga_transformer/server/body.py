"""Reading a request's JSON body: bounded in bytes and in time, whatever its content type says."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from maga_transformer.request import Fault, RequestError
from maga_transformer.server.state import State
from maga_transformer.server.streaming import ClientGone

_NO_NUMBER = re.compile(r"-?(?:nan|inf(?:inity)?)", re.IGNORECASE)
_TOO_LARGE = re.compile(r"-?[\d.eE+]{1,32}")
_NAME = re.compile(r'"([A-Za-z_]\w{0,63})"\s*:[\s\[]*[-\d.,\s]*$')  # of the member whose value follows
SLOWEST = 16 << 10  # bytes/s of a body, on the whole


async def json_object(request: Request, limit: int) -> dict[str, Any]:
    """`limit` in bytes. curl's default content type is taken as well as application/json."""
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding not in ("", "identity"):
        raise RequestError(Fault.encoding, f"Content-Encoding {encoding[:32]!r} is not taken; send the body as it is")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limit:
        raise _too_large(limit)
    body = await _read(request, limit, State.of(request).runtime.config.read_timeout)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(
            Fault.body, f"the body is not JSON: {_why(error)} at line {error.lineno}, column {error.colno}"
        ) from None
    if not isinstance(value, dict):
        raise RequestError(Fault.body, f"the body must be a JSON object, not {_json_name(value)}")
    return value


async def _read(request: Request, limit: int, patience: float) -> bytes:
    body = bytearray()
    stream = request.stream()
    began = time.monotonic()
    while True:
        behind = time.monotonic() - began - len(body) / SLOWEST
        try:
            part = await asyncio.wait_for(anext(stream, None), max(0.0, patience - max(0.0, behind)))
        except asyncio.TimeoutError:
            raise RequestError(
                Fault.slow_body,
                f"{len(body)} bytes of the body came in {time.monotonic() - began:.0f} s: it may be silent, or behind "
                f"{SLOWEST} bytes/s, for {patience:g} s (READ_TIMEOUT)",
            ) from None
        except ClientDisconnect:
            raise ClientGone from None
        if part is None:
            return bytes(body)
        body += part
        if len(body) > limit:
            raise _too_large(limit)


def _why(error: orjson.JSONDecodeError) -> str:
    """Numbers that are none get the name of their field, as many clients' languages write them."""
    number = (_TOO_LARGE if "infinity" in error.msg else _NO_NUMBER).match(error.doc, error.pos)
    if number is None:
        return error.msg
    name = _NAME.search(error.doc[max(0, error.pos - 200) : error.pos])
    return f"{f'{name[1]}=' if name else ''}{number[0]}: must be a finite number"


def _too_large(limit: int) -> RequestError:
    return RequestError(Fault.too_large, f"the body is larger than the limit of {limit} bytes (MAX_BODY_MB)")


def _json_name(value: object) -> str:
    return {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")
