"""The command line: `maga serve`, `run`, `chat`, `complete`, `bench`, `eval`, `quantize`, `explain`, `config`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from maga_transformer import __version__
from maga_transformer.cli import bench, evaluate, quantize, serve, show, talk
from maga_transformer.cli.options import several_names, with_settings
from maga_transformer.config import ConfigError

_SERVER_ONLY = ("Chats", "The server", "Operation")  # titles of settings that only `serve` has

app = typer.Typer(
    name="maga",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-"), "help_option_names": ["-h", "--help"]},
)
app.command("serve")(with_settings(serve.serve, foreign=True))
app.command("chat")(with_settings(talk.chat, leave_out=_SERVER_ONLY))
app.command("complete")(with_settings(talk.complete, leave_out=_SERVER_ONLY))
app.command("run")(with_settings(talk.run, leave_out=_SERVER_ONLY))
app.command("bench")(with_settings(bench.bench, leave_out=_SERVER_ONLY))
app.command("eval")(with_settings(evaluate.evaluate, leave_out=_SERVER_ONLY))
app.command("quantize")(quantize.quantize)
app.command("explain")(show.explain)
app.command("config")(with_settings(show.config, foreign=True))


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    """An LLM inference engine."""
    if version:
        print(__version__)
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> None:
    """A user's mistake ends with one line on stderr and status 2."""
    _open_standard_streams()
    try:
        app(args=several_names(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `maga config | head`
        sys.stderr.close()
        sys.exit(0)
    except Exception as error:
        if not _is_users(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _open_standard_streams() -> None:
    """Closed ones (`2>&-`) lead nowhere: otherwise the first sockets would have their numbers, and get what is written to them."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (gets the lowest number that is free)


def _is_users(error: Exception) -> bool:
    """What the configuration, the checkpoint readers, the core, a server and a full disk raise about what the user gave them."""
    from maga_transformer._core import MagaError
    from maga_transformer.request import RequestError

    return isinstance(error, (ConfigError, RequestError, MagaError, OSError, ValueError))
