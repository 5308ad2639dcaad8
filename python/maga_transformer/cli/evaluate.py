"""`maga eval`."""

from __future__ import annotations

from typing import Annotated

import typer

from maga_transformer.cli.options import File, load


def evaluate(
    path: Annotated[str, typer.Argument(metavar="MODEL", help="model folder or GGUF file")],
    text: Annotated[str, typer.Option(help="file to predict; without: three chapters of Alice in Wonderland")] = "",
    against: Annotated[
        list[str] | None,
        typer.Option(metavar="SETTINGS", help="measure again with these: SETTING=VALUE[,...], or another model's path; may repeat"),
    ] = None,
    window: Annotated[int, typer.Option(help="tokens that the model sees at once; 0: 1024, or its context")] = 0,
    stride: Annotated[int, typer.Option(help="tokens from one window to the next; 0: half a window")] = 0,
    config: File = "",
    *,
    settings: dict[str, object],
) -> None:
    """Print the model's perplexity on a text, as it is served."""
    loaded = load(path, config, settings)
    from rich.console import Console

    from maga_transformer.evaluate import evaluate

    chosen = {name: getattr(loaded, name) for name in loaded.sources}
    evaluate(chosen, against=against or [], text_file=text, window=window, stride=stride, console=Console(width=120))
