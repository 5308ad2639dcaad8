"""The load of benchmarks/serve.py without a server: the engine in this process with the server's settings, driven as the server
drives it. A process of its own, which prints one line of JSON.

    python benchmarks/offline_load.py MODEL --load '{"requests": 256, ...}' [settings of `maga serve`]
"""

import dataclasses
import json
import select
import time
from typing import Annotated

import numpy as np
import typer
from http_load import Load, Seen
from maga_transformer import _core
from maga_transformer.cli.options import load as load_config
from maga_transformer.cli.options import with_settings
from maga_transformer.runtime import Runtime
from maga_transformer.startup import load_runtime


def offline(model: str, load: Annotated[str, typer.Option()], *, settings: dict[str, object]) -> None:
    asked = Load(**json.loads(load))
    runtime = load_runtime(load_config(model, "", settings))
    warm = dataclasses.replace(asked, requests=min(asked.requests, asked.concurrency), seed=asked.seed + 1)
    run(runtime, warm)
    seen = run(runtime, asked)
    print(json.dumps({"tokens": seen.tokens, "seconds": seen.seconds, "cpu": seen.cpu}), flush=True)


def run(runtime: Runtime, load: Load) -> Seen:
    engine, seen, waiting = runtime.engine, Seen(), iter(load.prompts())
    params = _core.SamplingParams(max_new_tokens=load.tokens_out, temperature=0.0)  # no stop tokens: past the end of text

    def ask() -> int:
        prompt = next(waiting, None)
        return 0 if prompt is None else engine.submit(np.asarray(prompt, dtype=np.int32), params)

    cpu, seen.begun = time.process_time(), time.monotonic()
    running = {request for request in (ask() for _ in range(load.concurrency)) if request}
    while running:
        select.select([engine.event_fd()], [], [])
        for event in engine.poll():
            seen.tokens += len(event.tokens)
            if not event.finish:
                continue
            if event.finish != "length":
                raise RuntimeError(f"a sequence ended with {event.finish}: {event.error}")
            running.discard(event.request)
            request = ask()
            if request:
                running.add(request)
    seen.ended, seen.cpu = time.monotonic(), time.process_time() - cpu
    return seen


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(with_settings(offline, foreign=True))
    app()
