"""From a configuration to a server that answers, and down again without breaking an answer."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import time
from types import FrameType

import uvicorn

from maga_transformer import __version__
from maga_transformer.chat.named_templates import NAMED_TEMPLATES, fallback_template
from maga_transformer.config import Config, ConfigError, ineffective_settings, public_value
from maga_transformer.memory import memory_bytes
from maga_transformer.models.task import GENERATE
from maga_transformer.runtime import Runtime
from maga_transformer.server.app import create_app
from maga_transformer.server.loading import telling_of_the_load
from maga_transformer.server.log import configure
from maga_transformer.server.protocol import BoundedHead
from maga_transformer.startup import load_runtime

log = logging.getLogger(__name__)

_BACKLOG = 2048
_LOOK = 0.02  # seconds between looks at what is left to drain


def serve(config: Config) -> None:
    """Returns after SIGTERM or SIGINT, when the running requests have ended."""
    configure(config)
    _check_certificate(config)
    names = ineffective_settings()
    if names:
        log.warning(
            "without effect here, as they tune parts that this engine does not have or sizes by itself: %s", ", ".join(names)
        )
    if os.getpid() == 1:  # a container's first process: the kernel drops signals that it has no handler for
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    listener = _bind(config)  # before the weights: a taken port should not cost a load
    _listen(listener, config)
    with telling_of_the_load(listener, config):
        runtime = load_runtime(config)
    server = _DrainingServer(
        runtime,
        uvicorn.Config(
            create_app(runtime),
            loop="uvloop",
            http=functools.partial(BoundedHead, head_seconds=config.read_timeout),  # type: ignore[arg-type]
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=config.timeout_keep_alive,
            timeout_graceful_shutdown=max(1, round(config.drain_timeout)),
            backlog=_BACKLOG,
            root_path=config.root_path,
            ssl_certfile=config.ssl_certfile or None,
            ssl_keyfile=config.ssl_keyfile or None,
        ),
    )
    port = listener.getsockname()[1]
    if runtime.description.task.kind == GENERATE and not runtime.tokenizer.chat_template:
        log.warning(
            "the model has no chat template, so chats are written as %s: set CHAT_TEMPLATE to a file or one of %s",
            fallback_template(runtime.tokenizer.token_id, runtime.description.family),
            ", ".join(NAMED_TEMPLATES),
        )
    server.greeting = greeting(runtime, config.host, port)
    gc.collect()
    gc.freeze()  # what lives as long as the server need not be searched for garbage again and again
    try:
        with listener:
            server.run(sockets=[listener])
    finally:
        _flush()


def greeting(runtime: Runtime, host: str, port: int) -> str:
    """The start message: what runs, on what, how much fits, and a command to try."""
    about = runtime.description
    name = "localhost" if host in ("0.0.0.0", "::", "") else f"[{host}]" if ":" in host else host
    url = f"{'https' if runtime.config.ssl_certfile else 'http'}://{name}:{port}"
    body = '{"prompt": "hello, what is your name", "generate_config": {"max_new_tokens": 100}}'
    weights = f"{about.weight_bytes / 2**20:.0f} MiB ({about.stored})"
    lines = [
        f"maga_transformer {__version__}",
        f"device    {about.device}",
        f"model     {about.names[0]} ({about.family}), {weights}, loaded in {about.load_seconds:.1f} s",
        f"tokens    {runtime.tokenizer.vocab_size}, of {runtime.config.tokenizer_path or 'the checkpoint'}",
    ]
    if about.task.kind == GENERATE:
        lines.append("chat      " + _chats(runtime))
    lines += [
        f"K/V       {about.kv_bytes / 2**20:.0f} MiB of {about.kv_dtype} hold {about.kv_tokens} tokens ({about.kv_measured})",
        f"context   {about.context} tokens; {about.kv_tokens // about.context} sequences of that length fit at once",
    ]
    if about.prefix:
        lines.append(f"prompts   begin with {about.prefix}")
    memory = about.card_bytes or memory_bytes()
    if memory:
        parts = {"weights": about.weight_bytes, "K/V": about.kv_bytes, "buffers": about.buffer_bytes}
        shares = [f"{name} {part / memory:.1%}" for name, part in parts.items()]
        lines.append(f"memory    {', '.join(shares)} of {memory / 2**20:.0f} MiB")
    if about.sampling_defaults:
        lines.append("sampling  " + ", ".join(f"{name}={value}" for name, value in about.sampling_defaults.items()))
    lines += [
        f"setting   {name}={public_value(runtime.config, name)} ({source})" for name, source in runtime.config.sources.items()
    ]
    if runtime.config.chat_page:
        lines.append(f"page      {url}/ in a browser: to chat, and to watch the engine")
    insecure = " -k" if runtime.config.ssl_certfile else ""
    return "\n".join([*lines, f"ready     {url}", f"try       curl{insecure} -XPOST {url} -d '{body}'"])


def _chats(runtime: Runtime) -> str:
    place = runtime.tokenizer.chat_template_place
    if not place:
        name = fallback_template(runtime.tokenizer.token_id, runtime.description.family)
        return f"by the template {name}, for want of the model's own (--chat-template)"
    dialect = runtime.config.dialect(runtime.tokenizer.chat_templates)
    tools = "harmony" if dialect.harmony else dialect.tools.name if dialect.tools else "text"
    thoughts = "harmony" if dialect.harmony else dialect.reasoning.name if dialect.reasoning else "text"
    described = "" if dialect.template_knows_tools else ", described in the system message"
    return f"by {place}; tool calls are read as {tools}{described}; thoughts as {thoughts}"


def _check_certificate(config: Config) -> None:
    """Before the load, and with the settings' names."""
    if not config.ssl_certfile:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.ssl_certfile, config.ssl_keyfile or None, password="")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"SSL_CERTFILE={config.ssl_certfile}, SSL_KEYFILE={config.ssl_keyfile}: {error}") from None


def _bind(config: Config) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise _cannot_listen(config, error) from None
    return listener


def _listen(listener: socket.socket, config: Config) -> None:
    """Another process may have bound the same port meanwhile; the first to listen keeps it."""
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        raise _cannot_listen(config, error) from None


def _cannot_listen(config: Config, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen on {config.host}:{config.port} (START_PORT, --port, --host): {error.strerror or error}")


def _print(text: str) -> None:
    """Whoever reads the output may be gone (`| head`), or the disk full: no reason not to serve."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def _flush() -> None:
    """What nobody takes is dropped, rather than make the exit fail."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except (AttributeError, ValueError):  # there is none, or it is closed
            pass


class _DrainingServer(uvicorn.Server):
    """The first signal lets running requests finish, while /health says "draining"; the second ends at once."""

    def __init__(self, runtime: Runtime, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.greeting = ""
        self._runtime = runtime
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            _print(self.greeting)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn leaves this out then, and the lifespan's task would end in a traceback
            await self.lifespan.shutdown()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is None or self._runtime.draining:
            self.should_exit = self.force_exit = True
            return
        self._runtime.draining = True
        self._loop.call_soon_threadsafe(self._start_drain)

    def _start_drain(self) -> None:
        self._drain = asyncio.ensure_future(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        runtime, seconds = self._runtime, self._runtime.config.drain_timeout
        log.warning("shutting down: %d requests run, they have %.0f s to finish", runtime.in_flight, seconds)
        try:
            runtime.engine.drain(
                0
            )  # takes no more; waiting is left to this loop, as a thread that waits would hold up a forced exit
            end = time.monotonic() + seconds
            while runtime.in_flight and time.monotonic() < end:
                await asyncio.sleep(_LOOK)
            if runtime.in_flight:
                log.warning("%d requests did not finish in time and are cancelled", runtime.in_flight)
                runtime.cancel_all()
        finally:
            self.should_exit = True
