"""Keys: every route but health and the files of the page wants one if there are any, and what changes the server wants the
administrator's."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import Scope

from maga_transformer.request import Fault, RequestError
from maga_transformer.server import page

LIVE_PATHS = ("/health/live", "/liveness")
_HEALTH = ("/health", "/health/ready", *LIVE_PATHS, "/health_check", "/status", "/ping", "/frontend_health")
_HEALTH_SERVICES = ("/GraphService/cm2_status", "/SearchService/cm2_status")
OPEN_PATHS = frozenset((*_HEALTH, *_HEALTH_SERVICES, *(f"/page/{name}" for name in page.FILES)))
ADMIN_PATHS = frozenset({"/update", "/set_log_level", "/server_info"})


def is_open(method: str, path: str) -> bool:
    """Whether a route wants no key: health, the page's files, and what a browser asks before it sends one."""
    return method == "OPTIONS" or path in OPEN_PATHS or (method in ("GET", "HEAD") and path == "/")


def route_path(scope: Scope) -> str:
    """The path as routes have it, without ROOT_PATH, which the server puts before it."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


class Keys:
    """Compared by their digests, all of them each time: the time it takes tells neither a key nor its place."""

    def __init__(self, keys: Sequence[str], admin_keys: Sequence[str]) -> None:
        self._keys = [_digest(key.encode()) for key in keys]
        self._admin = [_digest(key.encode()) for key in admin_keys]

    def check(self, scope: Scope) -> None:
        """Raises RequestError where the request brings no key that opens its route."""
        if not self._keys and not self._admin:
            return
        path = route_path(scope)
        if is_open(scope["method"], path):
            return
        given = _digest(_given(scope))
        admin, client = _among(given, self._admin), _among(given, self._keys)
        if path in ADMIN_PATHS:
            if not admin:
                raise RequestError(Fault.wrong_key if client else Fault.no_key, "this route needs the administrator's key")
        elif self._keys and not (client or admin):
            raise RequestError(Fault.no_key, "no valid key: send `Authorization: Bearer KEY` or `x-api-key: KEY`")


def _given(scope: Scope) -> bytes:
    headers = dict(scope["headers"])
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and token.strip():
        return bytes(token.strip())
    return bytes(headers.get(b"x-api-key", headers.get(b"x-admin-key", b"")))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _among(given: bytes, digests: Sequence[bytes]) -> bool:
    found = False
    for digest in digests:
        found |= hmac.compare_digest(given, digest)
    return found
