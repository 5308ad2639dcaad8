"""The command line: `maga serve`, `maga run`, `maga explain`, `maga config`. Its options are made from `Config`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from maga_transformer import __version__
from maga_transformer.config import Config, ConfigError, environment_names, flag_names

_SERVER_ONLY = (
    "host",
    "port",
    "timeout_keep_alive",
    "drain_timeout",
    "max_body_mb",
    "ft_server_test",
    "log_level",
    "served_model_name",
    "concurrency_limit",
)
app = typer.Typer(
    name="maga",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-"), "help_option_names": ["-h", "--help"]},
)


def _with_settings(command: Callable[..., None], leave_out: Sequence[str] = ()) -> Callable[..., None]:
    """Gives a command one option a setting of Config, and passes those that were given as its `settings`."""
    own = [parameter for parameter in inspect.signature(command, eval_str=True).parameters.values() if parameter.name != "settings"]
    fields = {name: field for name, field in Config.model_fields.items() if name not in leave_out}

    def call(**values: Any) -> None:
        settings = {name: values.pop(name) for name in fields if name in values}
        command(**values, settings={name: value for name, value in settings.items() if value is not None})

    options = []
    for name, field in fields.items():
        default = _shown(field.get_default(call_default_factory=True))
        help = f"{field.description} ({', '.join(environment_names(name, field))}, default {default})"
        option = typer.Option(*flag_names(name, field), help=help, metavar="VALUE", show_default=False)
        options.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, option])
        )
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    call.__signature__ = inspect.Signature(parameters + options)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters + options}
    call.__doc__, call.__name__ = command.__doc__, command.__name__
    return call


def _shown(default: object) -> str:
    return "none" if default in ("", []) else str(default)


_Path = Annotated[
    str | None,
    typer.Argument(metavar="[PATH]", help="model folder or GGUF file; without: CHECKPOINT_PATH", show_default=False),
]
_File = Annotated[
    str, typer.Option("--config", help="YAML file of settings; flags and environment win over it", show_default=False)
]


def serve(path: _Path = None, config: _File = "", *, settings: dict[str, object]) -> None:
    """Serve a model over HTTP: RTP-LLM's POST /, OpenAI's /v1 routes, /health and /metrics."""
    loaded = _load(path, config, settings)  # a mistake is told before the slow imports
    from maga_transformer.server.serve import serve

    serve(loaded)


def run(
    path: Annotated[str, typer.Argument(help="model folder or GGUF file")],
    prompt: Annotated[str, typer.Argument(help="text to continue, or with --chat a message to answer")],
    chat: Annotated[bool, typer.Option("--chat", help="answer through the model's chat template")] = False,
    max_new_tokens: Annotated[int, typer.Option(help="tokens to generate at most")] = 256,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token")] = 0.0,
    config: _File = "",
    *,
    settings: dict[str, object],
) -> None:
    """Generate text in the terminal, without a server."""
    loaded = _load(path, config, settings)
    from maga_transformer.llm import LLM

    chosen = {name: getattr(loaded, name) for name in loaded.sources if name != "checkpoint_path"}
    with LLM(loaded.checkpoint_path, **chosen) as llm:
        question: str | list[int] = prompt
        if chat:
            text = llm.tokenizer.apply_chat_template([{"role": "user", "content": prompt}], None, add_generation_prompt=True)
            question = llm.tokenizer.encode(text, add_special_tokens=False)
        for piece in llm.stream(question, max_new_tokens=max_new_tokens, temperature=temperature):
            print(piece, end="", flush=True)
        print()


@app.command()
def explain(
    path: Annotated[str, typer.Argument(help="model folder or GGUF file")],
    batch: Annotated[int, typer.Option(min=1, help="sequences of the step")] = 1,
    context: Annotated[int, typer.Option(min=0, help="tokens each sequence has before it")] = 512,
    model_type: Annotated[str | None, typer.Option(help="model family; without: read from the checkpoint")] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="element type of keys and values")] = "fp16",
    bandwidth_gb: Annotated[float | None, typer.Option(help="GB/s of memory; without: measured on this machine")] = None,
    gflops: Annotated[float | None, typer.Option(help="GFLOP/s; without: measured on this machine")] = None,
) -> None:
    """Print the model as a program: ops, shapes, bytes, FLOPs, and the least time a decode step can take."""
    from rich.console import Console

    from maga_transformer.explain import explain

    explain(
        path,
        batch=batch,
        context=context,
        model_type=model_type,
        kv_dtype=kv_cache_dtype,
        bandwidth_gb=bandwidth_gb,
        gflops=gflops,
        console=Console(width=160),  # a table is never cut; it is narrower than this
    )


def show_config(path: _Path = None, config: _File = "", *, settings: dict[str, object]) -> None:
    """Print every setting with its value and where it came from."""
    loaded = _load(path, config, settings)
    for name, field in Config.model_fields.items():
        print(f"{name:24} {_shown(getattr(loaded, name)):24} {loaded.sources.get(name, 'default'):32} {field.description}")


app.command("serve")(_with_settings(serve))
app.command("run")(_with_settings(run, ("checkpoint_path", *_SERVER_ONLY)))
app.command("config")(_with_settings(show_config))


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    """An LLM inference engine."""
    if version:
        print(__version__)
        raise typer.Exit


def _load(path: str | None, file: str, settings: dict[str, object]) -> Config:
    given = {"checkpoint_path": path} if path else {}
    if path and settings.get("checkpoint_path") not in (None, path):
        raise ConfigError(f"PATH={path} and --checkpoint-path={settings['checkpoint_path']} name two checkpoints; keep one")
    return Config.load({**settings, **given}, file=file)


def main(arguments: Sequence[str] | None = None) -> None:
    """A user's mistake ends with one line on stderr and status 2."""
    try:
        app(args=list(arguments) if arguments is not None else None)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if not _is_users(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _is_users(error: Exception) -> bool:
    """What the configuration, the checkpoint readers and the core raise about what the user gave them."""
    from maga_transformer._core import MagaError
    from maga_transformer.request import RequestError

    return isinstance(
        error, (ConfigError, RequestError, MagaError, FileNotFoundError, IsADirectoryError, PermissionError, ValueError)
    )


if __name__ == "__main__":
    main()
