"""`maga run`, `maga complete` and `maga chat`: text on the terminal, as it comes."""

from __future__ import annotations

import inspect
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Annotated, Any

import typer

from maga_transformer.cli.options import File, load
from maga_transformer.cli.speaker import Answer, Drawing, Message, open_speaker
from maga_transformer.config import ConfigError
from maga_transformer.request import RequestError

Where = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL|URL]", help="model folder, GGUF file, or the URL of a server; without: CHECKPOINT_PATH, or the server here"
    ),
]
Url = Annotated[str, typer.Option("--url", help="a server's URL, with or without /v1", show_default=False)]
Key = Annotated[
    str,
    typer.Option(
        "--api-key", envvar="OPENAI_API_KEY", show_envvar=False, help="the server's key [OPENAI_API_KEY]", show_default=False
    ),
]
_Name = Annotated[str, typer.Option("--model-name", help="which of the server's models; without: its first", show_default=False)]
_DRAWING: dict[str, Any] = {  # options for the fields of Drawing
    "max_tokens": Annotated[int | None, typer.Option("--max-tokens", "--max-new-tokens", min=1, help="tokens to generate at most")],
    "temperature": Annotated[float | None, typer.Option(help="0: always the most likely token")],
    "top_p": Annotated[float | None, typer.Option(help="draw from the most likely tokens that have this share together")],
    "top_k": Annotated[int | None, typer.Option(help="draw from this many of the most likely tokens")],
    "seed": Annotated[int | None, typer.Option(help="the same seed draws the same text")],
    "stop": Annotated[list[str] | None, typer.Option(help="text that ends the output (repeatable)", show_default=False)],
}
_CHAT_HELP = "/clear begins anew, /system TEXT sets a system prompt, /exit or Ctrl-D ends; Ctrl-C stops an answer"


def _draws(**defaults: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command that takes a `drawing` gets its fields as options there, with these defaults."""

    def with_options(command: Callable[..., None]) -> Callable[..., None]:
        def call(*, stop: list[str] | None, **values: Any) -> None:
            given = {name: values.pop(name) for name in _DRAWING if name != "stop"}
            command(**values, drawing=Drawing(**given, stop=tuple(stop or ())))

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            if parameter.name == "drawing":
                parameters += [
                    parameter.replace(name=name, annotation=option, default=defaults.get(name)) for name, option in _DRAWING.items()
                ]
            else:
                parameters.append(parameter)
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__doc__, call.__name__ = command.__doc__, command.__name__
        return call

    return with_options


@_draws(max_tokens=256, temperature=0.0)
def run(
    path: Annotated[str, typer.Argument(metavar="MODEL|URL", help="model folder, GGUF file, or the URL of a server")],
    prompt: Annotated[str, typer.Argument(help="text to continue, or with --chat a message to answer")],
    *,
    chat: Annotated[bool, typer.Option("--chat", help="answer through the model's chat template")] = False,
    drawing: Drawing,
    api_key: Key = "",
    config: File = "",
    settings: dict[str, object],
) -> None:
    """Answer one prompt on the terminal and end."""
    with open_speaker(path, api_key, "", load(path_of(path), config, settings)) as speaker:
        tell(speaker.chat([{"role": "user", "content": prompt}], drawing) if chat else speaker.complete(prompt, drawing))


@_draws(max_tokens=256, temperature=0.0)
def complete(
    where: Where = None,
    prompt: Annotated[str | None, typer.Argument(help="text to continue; without: every line of the input is one")] = None,
    *,
    url: Url = "",
    model_name: _Name = "",
    api_key: Key = "",
    drawing: Drawing,
    config: File = "",
    settings: dict[str, object],
) -> None:
    """Continue texts, by a model in this process or by a server."""
    with open_speaker(url or where, api_key, model_name, load(path_of(where), config, settings)) as speaker:
        if prompt is not None:
            tell(speaker.complete(prompt, drawing))
            return
        for text in _lines(f"{printable(speaker.name)}: every line is continued; Ctrl-D ends"):
            if text:
                tell(speaker.complete(text, drawing))
            else:
                print()  # so that every line of the input has its place in the output


@_draws(temperature=0.7)
def chat(
    where: Where = None,
    message: Annotated[str | None, typer.Option("--message", "--quick", help="answer this and end", show_default=False)] = None,
    system_prompt: Annotated[str, typer.Option(help="what the model is told before the conversation", show_default=False)] = "",
    *,
    url: Url = "",
    model_name: _Name = "",
    api_key: Key = "",
    drawing: Drawing,
    config: File = "",
    settings: dict[str, object],
) -> None:
    """Chat, with a model in this process or with a server."""
    with open_speaker(url or where, api_key, model_name, load(path_of(where), config, settings)) as speaker:
        turns: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
        if message is not None:
            tell(speaker.chat([*turns, {"role": "user", "content": message}], drawing))
            return
        failed = False
        for text in _lines(f"{printable(speaker.name)}: {_CHAT_HELP}"):
            if text in ("/exit", "/quit", "/bye"):
                break
            if text == "/clear":
                turns = [turn for turn in turns if turn["role"] == "system"]
            elif text.startswith("/system"):
                system = text.removeprefix("/system").strip()
                turns = [{"role": "system", "content": system}] if system else []
            elif text.startswith("/"):
                print(_CHAT_HELP, file=sys.stderr)
            elif text:
                asked = [*turns, {"role": "user", "content": text}]
                try:
                    turns = [*asked, {"role": "assistant", "content": tell(speaker.chat(asked, drawing))}]
                except (ConfigError, RequestError) as error:  # the conversation is as before the message
                    print(f"error: {printable(str(error))}", file=sys.stderr)
                    failed = True
        if failed and not sys.stdin.isatty():
            raise typer.Exit(2)


def path_of(where: str | None) -> str | None:
    return None if where and where.startswith(("http://", "https://")) else where


def _lines(greeting: str) -> Iterator[str]:
    """What the user types; on a terminal with a greeting, a prompt and line editing."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.rstrip("\n")
        return
    with suppress(ImportError):
        import readline  # noqa: F401  (input() edits lines with it)
    print(greeting, file=sys.stderr)
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return


def tell(answer: Answer) -> str:
    """Prints an answer as it comes; Ctrl-C stops it. Returns what came."""
    pieces: list[str] = []
    started, first = time.monotonic(), 0.0
    try:
        for piece in answer:
            first = first or time.monotonic()
            pieces.append(piece)
            print(printable(piece), end="", flush=True)
        print()
    except KeyboardInterrupt:
        answer.close()
        print(" [stopped]")
    seconds = time.monotonic() - first
    if sys.stderr.isatty() and answer.tokens > 1 and seconds > 0:
        rate = (answer.tokens - 1) / seconds
        print(
            f"\x1b[2m{answer.tokens} tokens, {rate:.1f} a second, the first after {first - started:.2f} s\x1b[0m", file=sys.stderr
        )
    return "".join(pieces)


def printable(text: str) -> str:
    """Without control characters: a model's output must not command the terminal."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "", text)
