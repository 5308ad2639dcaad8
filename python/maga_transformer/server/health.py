"""Whether the server is alive and whether it takes requests: by the engine's progress, not by the front end's answering."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from maga_transformer.server.errors import encode
from maga_transformer.server.state import State


def dead(state: State) -> str:
    """What only a new process mends; "": nothing."""
    stats = state.runtime.engine.stats()
    if stats["device_lost"]:
        return "the device is lost"
    if stats["loop_lost"]:
        return "the engine's loop has ended"
    return f"stalled: {state.watchdog.stuck}" if state.watchdog.stuck else ""


async def ready(request: Request) -> Response:
    """200 while requests are taken: for load balancers, and RTP-LLM's and vLLM's /health."""
    state = State.of(request)
    return _answer(dead(state) or ("draining" if state.runtime.draining else ""))


async def live(request: Request) -> Response:
    """200 while the process is worth keeping, also while it drains."""
    return _answer(dead(State.of(request)))


def _answer(reason: str) -> Response:
    return Response(encode(reason or "ok"), 503 if reason else 200, media_type="application/json")
