"""The page at `/`: static files, and what they show of the model and the engine. Its requests go to this server only."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from maga_transformer import __version__
from maga_transformer.models.task import GENERATE
from maga_transformer.request import Fault, RequestError
from maga_transformer.server.errors import encode
from maga_transformer.server.state import State

_FOLDER = Path(__file__).parent / "static"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
FILES = {file.name: file for file in sorted(_FOLDER.iterdir()) if file.suffix in _TYPES}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_GAUGES = ("running", "waiting", "pages_total", "pages_live", "pages_cached", "pages_free")
_COUNTERS = ("steps", "requests", "preemptions", "prompt_tokens", "cached_tokens", "output_tokens", "least_seconds")


async def home(request: Request) -> Response:
    """The page for a browser; RTP-LLM's answer for the rest."""
    if State.of(request).runtime.config.chat_page and "text/html" in request.headers.get("accept", ""):
        return _file("index.html")
    return Response(encode({"status": "home"}), media_type="application/json", headers={"Vary": "Accept"})


async def file(request: Request) -> Response:
    _require(request)
    name = str(request.path_params["name"])
    if name not in FILES:
        raise RequestError(Fault.not_found, f"there is no {request.url.path[:128]} here")
    return _file(name)


async def engine(request: Request) -> Response:
    """The model's facts, and the engine's gauges and counters; the page makes rates of these."""
    _require(request)
    request.state.private = True  # a line in the log every second would say nothing
    runtime = State.of(request).runtime
    about, config, stats = runtime.description, runtime.config, runtime.engine.stats()
    facts = {
        "name": about.names[0],
        "family": about.family,
        "device": about.device,
        "version": __version__,
        "context": about.context,
        "weight_bytes": about.weight_bytes,
        "kv_bytes": about.kv_bytes,
        "kv_tokens": about.kv_tokens,
        "kv_dtype": about.kv_dtype,
        "page_tokens": config.seq_size_per_block,
        "max_num_seqs": config.max_num_seqs,
        "max_queue": config.max_queue,
        "generates": about.task.kind == GENERATE,
        "chats": bool(runtime.tokenizer.chat_template),
        "sampling_defaults": dict(about.sampling_defaults),
    }
    busy = sum(stats[part + "_seconds"] for part in ("model", "sample", "host"))
    state = "draining" if runtime.draining else State.of(request).watchdog.stuck or "ok"
    live = {name: stats[name] for name in (*_GAUGES, *_COUNTERS)} | {"busy_seconds": busy, "state": state}
    return Response(encode({"model": facts, "engine": live}), media_type="application/json", headers={"Cache-Control": "no-store"})


def _require(request: Request) -> None:
    if not State.of(request).runtime.config.chat_page:
        raise RequestError(Fault.not_found, "the page is off (CHAT_PAGE)")


def _file(name: str) -> Response:
    path = FILES[name]
    return Response(path.read_bytes(), media_type=_TYPES[path.suffix], headers={**_HEADERS, "Vary": "Accept"})
